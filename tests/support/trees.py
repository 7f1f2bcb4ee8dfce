"""Random token trees, and what their nodes stand for."""

from hypothesis import strategies as st

from hf_retrieval_assist.token_tree import TokenTree


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
