"""Random token trees, what their nodes stand for, and token ids as structures take them."""

import numpy as np
from hypothesis import strategies as st

from hf_retrieval_assist.types.token_tree import TokenTree


def array(tokens):
    return np.array(tokens, np.int32)


def ids(*tokens):
    return array(tokens)


def ends_of(pattern, text):
    """1-based end positions of the occurrences, ascending."""
    size = len(pattern)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == pattern]


@st.composite
def trees(draw, max_nodes=24, tokens=4):
    """Random valid trees, each node of a class of its own, with few tokens so that two trees have
    equal paths."""
    nodes = {}
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, len(nodes) - 1))
        nodes.setdefault((parent, draw(st.integers(0, tokens - 1))), len(nodes))
    parents = [parent for parent, _ in nodes]
    rates = [draw(st.integers(0, 8)) / 8 for _ in nodes]
    probs = []
    for parent, rate in zip(parents, rates, strict=True):
        probs.append(rate * (1.0 if parent < 0 else probs[parent]))
    return TokenTree.build([token for _, token in nodes], parents, probs, range(len(nodes)))


def paths(tree):
    """Every node of a tree that is one, as the tokens that lead to it."""
    assert tree.fault(1 << 30, 1 << 30) is None
    return [tuple(tree.token_ids[tree.path(node)].tolist()) for node in range(len(tree))]


def check_draft(tree, drafter, budget):
    """The contract, and probabilities that are the products of the classes' priors."""
    assert tree.fault(1 << 30, 1 << 30) is None
    assert len(tree) <= budget
    rates = drafter.evidence.priors[tree.classes]
    expected = [rates[tree.path(node)].prod() for node in range(len(tree))]
    np.testing.assert_allclose(tree.probs, expected, rtol=1e-5, atol=0)
