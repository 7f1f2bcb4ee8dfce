"""Two processes that compute one model together, or each its own batch of it."""

import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
import transformers
from packaging.version import Version
from transformers import LlamaForCausalLM

from hf_retrieval_assist.host.transformers_private import PIPELINES_SINCE

from ..support.tiny_models import tiny_config, tiny_model
from .rank_process import CASES

pytestmark = pytest.mark.slow

LIMIT = 240  # seconds; what hangs ends by then
# What a case asks of `distributed_config=`.
SIZES = {
    "distributed_config": "fsdp_size",
    "pipeline_parallel": "pp_size",
    "plain_pipeline": "pp_size",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = tiny_config(LlamaForCausalLM.config_class, num_key_value_heads=4, vocab_size=128)
    tiny_model(LlamaForCausalLM, config).save_pretrained(path)
    return path


def run_ranks(case, folder, store):
    """What the two ranks printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.host.rank_process", case, folder, store, str(rank)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    ends = [f"rank {rank}: {out}{errors[-3000:]}" for rank, (out, errors) in enumerate(printed)]
    assert codes == [0, 0], "\n".join(ends)
    assert all(output.endswith("done\n") for output, _ in printed)
    return [output for output, _ in printed]


def lacking(case):
    """What a case needs and is not there, or nothing."""
    if case == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "needs deepspeed: make test-deepspeed"
    if size := SIZES.get(case):
        config = pytest.importorskip("transformers.distributed").DistributedConfig
        if size not in inspect.signature(config).parameters:
            return f"this version of transformers knows no {size}"
    drafted = Version(transformers.__version__) >= PIPELINES_SINCE
    if case == ("plain_pipeline" if drafted else "pipeline_parallel"):
        return f"pipelines are drafted for from transformers {PIPELINES_SINCE} on"
    return ""


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, folder, tmp_path):
    if reason := lacking(case):
        pytest.skip(reason)
    run_ranks(case, folder, tmp_path / "store")
