"""Corpora built by a Ray cluster of two nodes on this machine, whose workers and nodes die."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from hf_retrieval_assist.corpus.build import index_shard
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.extensions.ray.cluster import RayExecutor
from hf_retrieval_assist.tools.cli import main
from tests.support.byte_model import byte_tokenizer
from tests.support.documents import contents

try:
    from ray.cluster_utils import Cluster
except ImportError:
    Cluster = None

needs_ray = pytest.mark.skipif(Cluster is None, reason="needs the ray extra (make test-ray)")
VOCAB = 5000


@pytest.fixture(scope="module")
def cluster():
    import ray

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.second = made.add_node(num_cpus=1, object_store_memory=100 << 20)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def documents(tokens):
    rng = np.random.default_rng(1)
    while tokens > 0:
        length = int(rng.integers(1, 2000))
        tokens -= length
        yield (VOCAB ** rng.random(length)).astype(np.int32)


def dying_once(marker, fn, *args):
    """Kills the process that runs it, the first time."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return fn(*args)


class Disturbed(RayExecutor):
    """An executor whose second shard loses its worker, and its third one a whole machine."""

    def __init__(self, cluster, marker):
        super().__init__(cluster.address)
        self.cluster, self.marker, self.shards = cluster, marker, 0

    def submit(self, fn, /, *args, **kwargs):
        self.shards += fn is index_shard
        if fn is index_shard and self.shards == 2:
            return super().submit(dying_once, self.marker, fn, *args, **kwargs)
        future = super().submit(fn, *args, **kwargs)
        if fn is index_shard and self.shards == 3:
            self.cluster.remove_node(self.cluster.second)
            self.cluster.second = self.cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        return future


@needs_ray
@pytest.mark.parametrize(
    "tokens", [300_000, pytest.param(20_000_000, marks=pytest.mark.slow)], ids=str
)
def test_a_disturbed_cluster_builds_what_one_machine_builds(cluster, tmp_path, tokens):
    options = {"vocab_size": VOCAB, "memory": 60 * tokens // 5, "workers": 2, "progress": False}
    executor = Disturbed(cluster, tmp_path / "died")
    Datastore.build(documents(tokens), tmp_path / "far", executor=executor, **options)
    Datastore.build(documents(tokens), tmp_path / "near", **options)
    assert executor.shards >= 4
    assert (tmp_path / "died").exists()
    assert contents(tmp_path / "near") == contents(tmp_path / "far")
    assert not list(tmp_path.glob(".*.partial"))


@needs_ray
def test_texts_are_tokenised_by_the_cluster(cluster, tmp_path):
    words = ["the", "cat", "sat", "on", "a", "mat", "dog"]
    tokenizer = tmp_path / "tokenizer"
    byte_tokenizer().save_pretrained(tokenizer)
    rng = np.random.default_rng(2)
    for name in "abc":
        lines = [" ".join(rng.choice(words, 10)) for _ in range(9_000)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    sources = [str(tmp_path / f"{name}.txt") for name in "abc"]
    common = [*sources, "--tokenizer", str(tokenizer), "--memory", "8M", "--quiet"]
    assert main(["build", str(tmp_path / "near"), *common]) == 0
    assert main(["build", str(tmp_path / "far"), *common, "--ray", cluster.address]) == 0
    near, far = contents(tmp_path / "near"), contents(tmp_path / "far")
    assert len(near) > 2  # more than one shard
    assert near == far


@needs_ray
def test_what_a_task_raises_is_what_the_build_raises(cluster, tmp_path):
    executor = RayExecutor(cluster.address)
    with pytest.raises(FileNotFoundError):
        executor.submit(Path.read_bytes, tmp_path / "nowhere").result()
    with pytest.raises(ValueError, match="documents: expected ids from 0 to 9, got 10"):
        Datastore.build(
            [[1, 10]], tmp_path / "store", vocab_size=10, progress=False, executor=executor
        )
    assert not (tmp_path / "store").exists()
