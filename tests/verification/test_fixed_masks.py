"""Masks over whole buffers, against those of views."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification.fed_tokens import FedTokens
from hf_retrieval_assist.verification.fixed_masks import FixedMasks
from hf_retrieval_assist.verification.packed_buffer import PackedBuffer
from hf_retrieval_assist.verification.slot_layers import RowSlots
from hf_retrieval_assist.verification.tree_attention import LayerMask, TreeAttention

CPU = torch.device("cpu")

RULES = [
    LayerMask(),
    LayerMask(window=4),
    LayerMask(chunk=5),
    {"full": LayerMask(), "sliding": LayerMask(window=3), "chunked": LayerMask(chunk=6)},
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 3), st.integers(0, 2**32 - 1), st.booleans())
def test_masks_are_those_of_views(rules, batch, seed, padded):
    rng = np.random.default_rng(seed)
    prompt = 9
    lengths = [prompt + int(n) for n in rng.integers(0, 6, batch)]
    trees = []
    for _ in range(batch):
        n = int(rng.integers(0, 6))
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(n)]
        trees.append(TokenTree.build(rng.permutation(50)[:n], parents, np.full(n, 0.5)))
    mask = None
    if padded:
        mask = torch.ones(batch, prompt, dtype=torch.bool)
        for row in range(batch):
            mask[row, : int(rng.integers(0, 5))] = False
    slots = RowSlots(lengths)
    fed = FedTokens.of([1] * batch, trees, lengths).lines(CPU)
    expected, first = TreeAttention(rules, mask, torch.float32).masks(fed, slots)
    fed_width = fed.sees.shape[1]
    width, capacity = fed_width + int(rng.integers(0, 3)), 32
    fixed = FixedMasks(rules, batch, capacity, torch.float32, CPU)
    fixed.start(mask)
    buffer = PackedBuffer(fixed.fields(width, width), CPU)
    fixed.write(buffer.host, FedTokens.of([1] * batch, trees, lengths, width=width))
    buffer.send()
    actual = fixed.build(buffer.device)
    if not isinstance(rules, dict):
        expected, actual = {"all": expected}, {"all": actual}
    for kind, whole in expected.items():
        got = actual[kind]
        assert got.shape == (batch, 1, width, capacity)
        rule = rules[kind] if isinstance(rules, dict) else rules
        shown = first if rule.reach is not None and isinstance(rules, dict) else 0
        stop = slots.longest + fed_width
        if whole is None:
            whole = torch.zeros(batch, 1, fed_width, stop - shown)
        for row, tree in enumerate(trees):
            for node in range(1 + len(tree)):
                assert torch.equal(got[row, 0, node, shown:stop], whole[row, 0, node])
                hidden = torch.cat([got[row, 0, node, :shown], got[row, 0, node, stop:]])
                assert (hidden == torch.finfo(torch.float32).min).all()


def built(fixed, fed, columns):
    """Masks by kind of layer."""
    buffer = PackedBuffer(fixed.fields(fed.width, columns), CPU)
    fixed.write(buffer.host, fed)
    buffer.send()
    masks = fixed.build(buffer.device)
    return masks if isinstance(masks, dict) else {"all": masks}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_tokens_fed_one_after_another_see_what_they_would_together(rules, before, spare, seed):
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(-1, i - 2), i)) if i else -1 for i in range(8)]
    trees = [TokenTree.build(rng.permutation(50)[:8], parents, np.full(8, 0.5))] * 2
    fixed = FixedMasks(rules, 2, 32, torch.float32, CPU)
    together = FedTokens.of([1, 1], trees, [9, 12])
    later = replace(
        together,
        token_ids=together.token_ids[:, before:],
        depths=together.depths[:, before:],
        sees=together.sees[:, before:],
        offsets=np.arange(before, 9)[None],
        behind=together.depths,
    )
    assert np.array_equal(later.slots, together.slots[:, before:])
    whole, part = built(fixed, together, together.width), built(fixed, later, 9 + spare)
    for kind in whole:
        assert torch.equal(part[kind], whole[kind][:, :, before:])
