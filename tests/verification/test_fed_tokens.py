"""What a forward feeds, row by row and behind one another."""

import numpy as np
import pytest
import torch

from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification.fed_tokens import FedTokens

from .test_tree_attention import random_tree

CPU = torch.device("cpu")
ROOTS, LENGTHS = [7, 8, 9], [4, 6, 5]


def trees():
    rng = np.random.default_rng(0)
    return [random_tree(rng, 5, 3), TokenTree.empty(), random_tree(rng, 2, 1)]


def test_lines_of_all_rows_are_filled_up():
    fed = FedTokens.of(ROOTS, trees(), LENGTHS, width=8)
    assert fed.rows.tolist() == [0, 1, 2]
    assert fed.counts.tolist() == [6, 1, 3]
    assert fed.real.sum(axis=1).tolist() == [6, 1, 3]
    assert fed.slots.tolist() == [[length + i for i in range(8)] for length in LENGTHS]
    for row, tree in enumerate(trees()):
        nodes = slice(1, 1 + len(tree))
        assert fed.token_ids[row, 0] == ROOTS[row]
        assert fed.token_ids[row, nodes].tolist() == tree.token_ids.tolist()
        assert fed.depths[row, nodes].tolist() == tree.depths.tolist()
        np.testing.assert_array_equal(fed.sees[row, nodes, nodes], tree.ancestor_mask)
        assert fed.sees[row, :, 0].all()
        assert not fed.sees[row, :, 1 + len(tree) :].any()
    lines = fed.lines(CPU)
    assert lines.width == 8
    assert lines.max_depth == max(int(tree.depths.max(initial=0)) for tree in trees())
    for name, array in (("token_ids", fed.token_ids), ("depths", fed.depths)):
        assert getattr(lines, name).tolist() == array.tolist()
    assert torch.equal(lines.attends, torch.from_numpy(fed.sees))
    assert torch.equal(lines.columns, lines.depths)


@pytest.mark.parametrize("rows", [[0, 2], [1], [0, 1, 2]])
def test_packed_tokens_stand_behind_one_another_without_filler(rows):
    fed = FedTokens.of(ROOTS, trees(), LENGTHS, rows)
    packed = fed.packed(CPU)
    assert fed.rows.tolist() == rows
    assert fed.lengths.tolist() == [LENGTHS[row] for row in rows]
    for number, (row, begin) in enumerate(zip(rows, fed.begins, strict=True)):
        tree = trees()[row]
        own = slice(begin, begin + 1 + len(tree))
        assert packed.token_ids[own, 0].tolist() == [ROOTS[row], *tree.token_ids.tolist()]
        assert packed.depths[own, 0].tolist() == [0, *tree.depths.tolist()]
        np.testing.assert_array_equal(packed.attends[own, 0], fed.sees[number, : 1 + len(tree)])
        assert (packed.columns[own] == torch.from_numpy(fed.depths[number])).all()
    assert len(packed.token_ids) == sum(1 + len(trees()[row]) for row in rows)
