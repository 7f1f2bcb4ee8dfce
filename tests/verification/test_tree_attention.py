"""Masks of token trees, of views and of whole buffers, against their definition slot by slot."""

import numpy as np
import pytest
import torch

from hf_retrieval_assist.cache.slot_layers import RowSlots
from hf_retrieval_assist.engines.cuda.arena import Shape
from hf_retrieval_assist.engines.cuda.fixed_masks import FixedMasks
from hf_retrieval_assist.engines.cuda.packed_buffer import PackedBuffer
from hf_retrieval_assist.types.token_tree import Forest, TokenTree
from hf_retrieval_assist.verification.tree_attention import (
    LayerMask,
    TreeAttention,
    TreeLayout,
    TreeTokens,
)

CPU = torch.device("cpu")


def random_tree(rng, nodes, depth):
    """A tree of different tokens whose first nodes are a path of the given depth."""
    parents = [i - 1 if i < depth else int(rng.integers(-1, i)) for i in range(nodes)]
    probs = np.linspace(0.9, 0.1, max(nodes, 1))[:nodes]
    return TokenTree.build(np.arange(nodes) + 10, parents, probs)


RULES = {
    "everything": LayerMask(),
    "window": LayerMask(window=6),
    "narrow window": LayerMask(window=2),
    "chunks": LayerMask(chunk=5),
    "explicit": LayerMask(explicit=True),
}


def expected(rule, lengths, trees, padding, shown):
    """bool [batch, width, slots]: what the nodes of each row may see of slots `shown`."""
    width = 1 + max(len(tree) for tree in trees)
    allowed = np.zeros((len(lengths), width, len(shown)), bool)
    for row, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        depths = [0, *tree.depths.tolist()]
        parents = [0, *(tree.parents + 1).tolist()]
        kept = {slot: slot for slot in range(padding[row], length)}
        for query in range(1 + len(tree)):
            line = [query]
            while line[-1]:
                line.append(parents[line[-1]])
            # Where in the text each slot's token stands.
            places = kept | {length + node: length + depths[node] for node in line}
            for column, slot in enumerate(shown):
                if slot in places:
                    allowed[row, query, column] = reaches(
                        rule, length + depths[query], places[slot], padding[row]
                    )
    return allowed


def assert_defined(rule, lengths, trees, padding, actual, shown):
    """Rows of fill-up tokens may see what they like: nobody looks at them."""
    wanted = expected(rule, lengths, trees, padding, shown)
    for row, tree in enumerate(trees):
        nodes = 1 + len(tree)
        np.testing.assert_array_equal(actual[row, :nodes], wanted[row, :nodes])


def reaches(rule, query, key, start):
    """Whether a layer that sees everything, a window or a chunk looks from one place to another."""
    if rule.chunk is not None:
        return (query - start) // rule.chunk == (key - start) // rule.chunk
    return rule.window is None or query - key < rule.window


def masked(lengths, padding):
    """bool [batch, prompt slots], False at padding; None without padding."""
    if not any(padding):
        return None
    return torch.arange(min(lengths)) >= torch.tensor(padding)[:, None]


def built(rule, lengths, trees, padding, per_type):
    """The mask as the package builds it, and the slots that its columns stand for; tokens that are
    fed one after another see what they would together, columns of earlier ones being behind the
    kept slots."""
    slots = RowSlots(lengths)
    rules = {"kind": rule} if per_type else rule
    attention = TreeAttention(rules, masked(lengths, padding), torch.float32)
    _, fed = TreeTokens.of([7] * len(lengths), Forest.of(trees), lengths).lines(CPU)
    masks, views = attention.masks(fed, slots)
    mask = masks["kind"] if per_type else masks
    assert views[0].extent == views[1].extent == max(lengths) + fed.sees.shape[1]
    assert views[0].first is None
    first = views[1].first if rule.reach else 0
    assert slots.views == (None, None), "masks write nothing to the cache"
    late = TreeLayout(fed.depths[:, 1:], fed.depths, fed.sees[:, 1:])
    if mask is not None and late.depths.shape[1]:
        part = attention.masks(late, slots)[0]
        assert torch.equal(part["kind"] if per_type else part, mask[:, :, 1:])
    shown = range(first, max(lengths) + fed.sees.shape[1])
    hidden = expected(rule, lengths, trees, padding, range(first))
    assert not hidden.any()
    if mask is None:
        return np.ones((len(lengths), fed.sees.shape[1], len(shown)), bool), shown
    assert mask.shape == (len(lengths), 1, fed.sees.shape[1], len(shown))
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
    return (mask[:, 0] == 0).numpy(), shown


CAPACITY = 32


def in_buffers(rules, lengths, padding, depths, sees, columns):
    """The masks over whole buffers of some kinds of layers, bool [batch, width, slots]."""
    fixed = FixedMasks(Shape(len(lengths), CAPACITY, rules, torch.float32, CPU))
    fixed.start(masked(lengths, padding))
    width = sees.shape[1]
    buffer = PackedBuffer(fixed.fields(width, columns), CPU)
    fed = TreeLayout(depths[:, -width:], depths, sees)
    fixed.write(buffer.host, fed, np.array(lengths)[:, None])
    buffer.send()
    masks = fixed.build(buffer.device)
    for mask in masks.values():
        assert mask.shape == (len(lengths), 1, width, CAPACITY)
    return {kind: (mask[:, 0] == 0).numpy() for kind, mask in masks.items()}


def random_rows(seed):
    """Lengths, padding and trees of some rows."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 4))
    lengths = rng.integers(4, 14, batch).tolist() if seed % 3 else [9] * batch
    padding = rng.integers(0, 4, batch).tolist() if seed % 2 else [0] * batch
    # Deeper than every window, as long chains are; and rows that wait.
    trees = [random_tree(rng, int(rng.integers(0, 12)), int(rng.integers(0, 9))) for _ in lengths]
    return lengths, padding, trees


@pytest.mark.parametrize("per_type", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("seed", range(12))
def test_masks_are_their_definition(rule, per_type, seed):
    lengths, padding, trees = random_rows(seed)
    actual, shown = built(rule, lengths, trees, padding, per_type)
    assert_defined(rule, lengths, trees, padding, actual, shown)
    # Softmax over nothing is NaN, which would spread from fill-up tokens.
    assert actual.any(axis=-1).all()


@pytest.mark.parametrize("seed", range(24))
def test_masks_over_whole_buffers_are_their_definition(seed):
    """Several kinds of layers at once, and trees that are filled up."""
    lengths, padding, trees = random_rows(seed)
    width = 1 + max(map(len, trees)) + seed % 3
    fed = TreeTokens.of([7] * len(lengths), Forest.of(trees), lengths, width=width)
    actual = in_buffers(RULES, lengths, padding, fed.depths, fed.sees, width)
    late = in_buffers(RULES, lengths, padding, fed.depths, fed.sees[:, 1:], width + 2)
    for kind, rule in RULES.items():
        assert_defined(rule, lengths, trees, padding, actual[kind], range(CAPACITY))
        np.testing.assert_array_equal(late[kind], actual[kind][:, 1:])
