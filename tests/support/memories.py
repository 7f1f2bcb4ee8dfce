"""Made-up outputs, and what memories and logs hold of them."""

import time
from collections import Counter

import numpy as np

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.memory.log import OutputLog

WAIT = 60.0  # seconds, for what takes far less


def count(memory, tokens, fingerprint=""):
    tree = memory.tree(fingerprint)
    return 0 if tree is None else occurrences(tree, np.array(tokens, dtype=np.int32))


def random_output(rng, length=200, vocabulary=500):
    return rng.integers(0, vocabulary, length).astype(np.int32)


def occurrences(tree, tokens):
    """How often a tree holds some tokens."""
    return dict(tree.children(tokens[:-1])).get(int(tokens[-1]), 0)


def logged(path):
    log, found = OutputLog(path, 1 << 30), []
    while outputs := log.read().outputs:
        found += [output.token_ids.tolist() for output in outputs]
    return found


def check_memory(memory):
    """The memory is within its bound, and counts what it holds."""
    with memory.lock:
        kinds = memory._kinds
        tables = sum(table.nbytes for table in memory._tables.values())
        assert tables <= memory.max_bytes // 4
        assert memory.nbytes == memory._tree_bytes + memory._output_bytes + tables
        assert memory.nbytes <= memory.max_bytes
        assert memory._tree_bytes == sum(kind.tree.nbytes for kind in kinds.values())
        assert memory._output_bytes == sum(output.cost for output in memory._outputs)
        assert set(memory._outputs) == {o for kind in kinds.values() for o in kind.outputs}
        for name, kind in kinds.items():
            assert kind.outputs
            assert all(output.fingerprint == name for output in kind.outputs)
            texts = [kind.tree.tokens(output.sequence) for output in kind.outputs]
            tokens = Counter(token for text in texts for token in text.tolist())
            assert dict(kind.tree.children(np.empty(0, np.int32))) == tokens
            assert kind.tree.token_count == tokens.total()
            assert len(kind.tree) == len(texts)
            for text in texts:
                assert not len(text) or occurrences(kind.tree, text[: memory.max_depth])


def output(i, length=30):
    return np.arange(length, dtype=np.int32) + 1000 * i


def known(memory):
    """How often each output of the model "m" is remembered, by its number."""
    tree = memory.tree("m")
    if tree is None:
        return Counter()
    outputs = [tree.tokens(o.sequence) for o in memory._outputs if o.fingerprint == "m"]
    return Counter(int(tokens[0]) // 1000 for tokens in outputs)


def wait_until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def remembering(memory=None, **options):
    """An assistant that learns from its outputs."""
    return SamAssistant(memory=OutputMemory() if memory is None else memory, **options)


def rollouts(**options):
    """An assistant that learns from outputs of the same prompt."""
    return remembering(OutputMemory(by_prompt=True, half_life=16), **options)
