"""Made-up outputs, and what memories and logs hold of them."""

import numpy as np

from hf_retrieval_assist.memory.log import OutputLog


def count(memory, tokens, fingerprint=""):
    tree = memory.tree(fingerprint)
    return 0 if tree is None else tree.count(np.array(tokens, dtype=np.int32))


def random_output(rng, length=200, vocabulary=500):
    return rng.integers(0, vocabulary, length).astype(np.int32)


def logged(path):
    log, found = OutputLog(path, 1 << 30), []
    while outputs := log.read()[1]:
        found += [output.token_ids.tolist() for output in outputs]
    return found
