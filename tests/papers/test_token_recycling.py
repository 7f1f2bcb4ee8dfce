"""Token Recycling against its definition, on tables small enough to write down."""

import numpy as np
import pytest
import torch

from hf_retrieval_assist import OutputMemory
from hf_retrieval_assist.drafters.base import Feedback, Target
from hf_retrieval_assist.papers import TokenRecycling
from hf_retrieval_assist.papers.token_recycling import CHILD_COUNTS, PARENTS, RANKS
from hf_retrieval_assist.structures import draft_tree
from hf_retrieval_assist.types.token_tree import TokenTree
from hf_retrieval_assist.verification.verified import TopLogits
from tests.support.one_text import OneText
from tests.support.trees import check_draft, ids, paths


def target(vocab_size=100, **options):
    return Target(vocab_size, fingerprint="m", **options)


def feed(session, tokens, accepted, likeliest, committed=(0,)):
    """Show a forward over tokens, behind each of which some tokens were likeliest, best first."""
    logits = torch.zeros(len(tokens), 100)
    for row, best in enumerate(likeliest):
        logits[row, list(best)] = 10.0 - torch.arange(len(best))
    chain = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    shown = Feedback(ids(*tokens), ids(*accepted), chain, top=TopLogits(logits))
    session.commit(list(committed), shown)


def children(session, token):
    """What is drafted below a last token, at the first level."""
    session.commit([token], None)
    return [path[0] for path in paths(session.propose(255)) if len(path) == 1]


def test_the_tree_has_the_published_shape():
    assert CHILD_COUNTS.sum() == 60
    depths = draft_tree.depths(PARENTS - np.int32(1))
    assert np.bincount(depths)[1:].tolist() == [7, 20, 21, 8, 4]
    shape = paths(TokenTree.build(RANKS, PARENTS - 1, np.ones(60)))
    assert len(set(shape)) == 60
    assert all((*p[:-1], p[-1] - 1) in set(shape) for p in shape if p[-1])


def test_the_tree_is_laid_over_the_table():
    """By the definition: a node's token is its rank among the successors of its parent's token."""
    drafter, table = TokenRecycling(), {}
    session = OneText(drafter, [0], target())
    rng = np.random.default_rng(0)
    for token in range(40):
        table[token] = rng.permutation(60)[:8].tolist()  # those from 40 on are not known
        feed(session, [token], [0], [table[token]], [3])
    expected = []
    for parent, rank in zip(PARENTS.tolist(), RANKS.tolist(), strict=True):
        above = (3,) if not parent else expected[parent - 1]
        row = table.get(above[-1]) if above else None
        expected.append((*above, row[rank]) if row else None)
    drafted = session.propose(255)
    assert {(3, *path) for path in paths(drafted)} == {*expected} - {None}
    check_draft(drafted, drafter, 60)
    assert paths(session.propose(2)) == paths(drafted.prune(2))


def test_every_fed_token_writes_its_row_and_the_next_time_another():
    session = OneText(TokenRecycling(), [1], target())
    eight = [range(10 * n, 10 * n + 8) for n in range(4)]
    feed(session, [1, 2, 3], [0], eight[:3])  # 2 and 3 were rejected
    assert [children(session, token) for token in (1, 2, 3)] == [[*one][:7] for one in eight[:3]]
    feed(session, [2], [0], eight[3:])
    assert children(session, 2) == [*eight[3]][:7]
    assert children(session, 9) == []


@pytest.mark.parametrize(("accepted", "decides"), [([0, 1], 1), ([0], 2)])
def test_of_several_nodes_an_accepted_one_decides_and_else_the_last(accepted, decides):
    session = OneText(TokenRecycling(), [1], target())
    eight = [range(10 * n, 10 * n + 8) for n in range(3)]
    feed(session, [1, 5, 5], accepted, eight)
    assert children(session, 5) == [*eight[decides]][:7]


def test_tables_are_shared_but_not_what_is_told_in_confidence():
    memory = OutputMemory()
    drafter = TokenRecycling(memory)
    for options in ({"learn": False}, {"expected": (ids(1),)}):
        feed(OneText(drafter, [1], target(**options)), [4], [0], [range(8)])
        assert children(OneText(drafter, [1], target()), 4) == []
    feed(OneText(drafter, [1], target()), [4], [0], [range(8)])
    assert children(OneText(drafter, [1], target()), 4) == [*range(7)]
    assert memory.nbytes >= 101 * 8 * 4
    memory.forget()
    assert children(OneText(drafter, [1], target()), 4) == []
