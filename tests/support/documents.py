"""Made-up documents, datastores of them, and what these must hold."""

import numpy as np

from hf_retrieval_assist.corpus.datastore import Datastore

VOCAB = 262_144
SMALL = 64 * 32  # bytes of memory for the smallest shard


def make_documents(seed=0, documents=40, tokens=30, ids=12):
    rng = np.random.default_rng(seed)
    choices = np.append(rng.integers(0, VOCAB, ids - 2), [0, VOCAB - 1])
    return [rng.choice(choices, rng.integers(1, tokens)) for _ in range(documents)]


def build(documents, path, **options):
    return Datastore.build(documents, path, **{"vocab_size": VOCAB, "progress": False, **options})


def assert_holds(datastore, documents):
    found = list(datastore.documents())
    assert [ids.tolist() for _, ids in found] == [list(d) for d in documents]
    assert datastore.token_count == sum(map(len, documents))
    assert datastore.document_count == len(documents)
    datastore.verify()


def contents(path):
    """All bytes of a datastore, by the files' names."""
    return {file.name: file.read_bytes() for file in path.iterdir()}
