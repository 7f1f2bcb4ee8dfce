"""Token Recycling against its definition, on tables small enough to write down."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.drafters import token_recycling
from hf_retrieval_assist.drafters.base import Feedback, Target
from hf_retrieval_assist.drafters.token_recycling import (
    TEMPLATES,
    TokenRecyclingDrafter,
    template_of,
)
from hf_retrieval_assist.structures import draft_tree, successors
from hf_retrieval_assist.types.token_tree import TokenTree
from hf_retrieval_assist.verification.verified import TopLogits
from tests.support.trees import paths

CPU = torch.device("cpu")


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def target(vocab_size=10, fingerprint="a"):
    return Target(vocab_size, CPU, fingerprint)


def logits_preferring(vocab_size, *rows):
    """Logits whose likeliest tokens are, row by row, the given ones, best first."""
    logits = torch.zeros(len(rows), vocab_size)
    for row, best in enumerate(rows):
        for rank, token in enumerate(best):
            logits[row, token] = 10 - rank
    return logits


def feed(session, tokens, accepted, logits, committed):
    top = TopLogits(logits)
    chain = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    session.commit(committed, Feedback(ids(*tokens), ids(*accepted), chain, top=top))


def drafted(session, budget=64):
    """What is drafted, as the tokens that lead to each node."""
    return {*paths(session.propose(budget))}


@pytest.mark.parametrize(
    ("name", "per_level"), [("2.2.2", [8, 21, 25, 15, 8, 3]), ("sam", [7, 20, 21, 8, 4])]
)
def test_templates_have_the_published_shape(name, per_level):
    parents, ranks = template_of(TEMPLATES[name], 8)
    assert np.bincount(draft_tree.depths(parents))[1:].tolist() == per_level
    shape = paths(TokenTree.build(ranks, parents, np.ones(len(ranks))))
    assert len(set(shape)) == sum(per_level)
    # Every published tree is monotone: a path may lower any of its ranks and stay inside.
    assert all((*p[:-1], p[-1] - 1) in set(shape) for p in shape if p[-1])


def test_the_template_is_laid_over_the_table():
    """Paths [0], [1], [0,0], [0,1], [1,0] over rows 0 -> 1 2, 1 -> 3 4, 2 -> 5 6."""
    drafter = TokenRecyclingDrafter(top_k=2, template=(2, 2, 1, 0, 0, 0))
    session = drafter.start(ids(0, 1, 2, 9), target())
    logits = logits_preferring(10, (1, 2), (3, 4), (5, 6), (0, 7))
    feed(session, (0, 1, 2, 9), (0, 1, 2, 3), logits, [0])
    assert drafted(session) == {(1,), (2,), (1, 3), (1, 4), (2, 5)}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.data(), st.integers(0, 20))
def test_rows_to_learn_follow_the_rule(tokens, data, max_rejected):
    accepted = sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1))))
    places, starts = np.array(accepted, np.int64), np.zeros(1, np.int64)
    nodes = successors.rows_to_learn(ids(*tokens), places, 6, max_rejected, starts).tolist()
    best = {}
    for node, token in enumerate(tokens):
        if token < 6 and (node in accepted or best.get(token) not in accepted):
            best[token] = node
    mine = sorted(node for node in best.values() if node in accepted)
    others = sorted(set(best.values()) - set(mine))
    assert nodes == sorted(mine + others[:max_rejected])


def test_of_each_text_the_first_rejected_nodes_are_learnt():
    tokens, starts = ids(1, 2, 3, 4, 1, 5, 6, 7), np.array([0, 4, 6])
    nodes = successors.rows_to_learn(tokens, np.array([0, 4]), 9, 1, starts)
    # Token 1 was accepted in both texts: the last one counts.
    assert nodes.tolist() == [1, 4, 5, 6]
    with pytest.raises(ValueError, match="accepted: expected 0 to 7, got 8"):
        successors.rows_to_learn(tokens, np.array([8]), 9, 1, starts)


def test_the_table_stays_warm_until_it_is_forgotten():
    drafter = TokenRecyclingDrafter(top_k=1, template=(1, 0))
    feed(drafter.start(ids(0), target()), (0,), (0,), logits_preferring(10, (4,)), [4])

    def drafted_after(fingerprint):
        session = drafter.start(ids(0), target(fingerprint=fingerprint))
        return drafted(session)

    assert drafted_after("a") == {(4,)}
    assert drafted_after("another model") == set()
    drafter.memory.forget()
    assert drafted_after("a") == set()


def test_a_successor_that_stays_first_is_drafted_as_more_probable():
    drafter = TokenRecyclingDrafter(top_k=2, template=(2, 0, 0))
    session = drafter.start(ids(0), target())
    probs = []
    for best in [(1, 2), (1, 2), (1, 2), (2, 1), (3, 4)]:
        feed(session, (0,), (0,), logits_preferring(10, best), [0])
        probs.append(session.propose(8).probs[0])
    assert probs[0] < probs[1] < probs[2]
    assert probs[2] > probs[3] >= probs[4] == probs[0]


def test_without_logits_the_text_teaches():
    drafter = TokenRecyclingDrafter(top_k=2, template=(2, 0, 0))
    session = drafter.start(ids(7, 1, 7, 2), target())
    session.commit([7], None)
    assert session.propose(8).token_ids.tolist() == [2, 1]
    session.commit([3, 7], None)
    assert session.propose(8).token_ids.tolist() == [3, 2]
    # Only the last prompt token has logits, as with transformers' `logits_to_keep=1`.
    drafter = TokenRecyclingDrafter(top_k=1, template=(1, 1, 1, 0))
    session = drafter.start(ids(1, 2, 3), target())
    feed(session, (3,), (0,), logits_preferring(10, (9,)), [1])
    assert session.propose(8).token_ids.tolist() == [2, 3, 9]


def test_ids_beyond_the_logits_are_neither_learnt_nor_looked_up():
    """A multimodal prompt holds placeholder ids that the output layer does not have."""
    drafter = TokenRecyclingDrafter(top_k=2, template=(2, 0, 0))
    session = drafter.start(ids(1, 262_144, 2, 12), target(vocab_size=10))
    assert len(session.propose(8)) == 0
    logits = logits_preferring(10, (3,), (4,), (5,), (6,))
    feed(session, (1, 262_144, 2, 12), range(4), logits, [1])
    assert session.propose(8).token_ids[0] == 3
    session.commit([2], None)
    assert session.propose(8).token_ids[0] == 5


def test_a_simulation_need_not_know_its_vocabulary():
    unknown = target(vocab_size=2**31 - 1)
    drafter = TokenRecyclingDrafter(top_k=1, template=(1, 1, 0))
    session = drafter.start(ids(1, 2, 1), unknown)
    assert session.propose(8).token_ids.tolist() == [2, 1]
    session.commit([1_500_000, 1], None)
    assert session.propose(8).token_ids.tolist() == [1_500_000, 1]
    assert drafted(drafter.start(ids(1_500_000), unknown)) == {
        (1,),
        (1, 1_500_000),
    }
    assert len(drafter.start(ids(2_000_000_000), unknown).propose(8)) == 0


def test_rows_of_a_batch_teach_as_they_do_one_by_one(monkeypatch):
    """Each row feeds tokens of its own, and `_MOST_REJECTED` bounds every row by itself."""
    monkeypatch.setattr(token_recycling, "_MOST_REJECTED", 2)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((15, 60), dtype=np.float32))
    fed = rng.permutation(60)[:15].astype(np.int32)
    parts = [np.arange(0, 6), np.arange(6, 8), np.arange(8, 15)]
    accepted = [ids(0, 3), ids(0), ids(0, 1)]
    known = []
    for together in (True, False):
        drafter = TokenRecyclingDrafter(top_k=4)
        sessions = [drafter.start(ids(row), target(60)) for row in range(3)]
        tops = [TopLogits(logits, part) if together else TopLogits(logits[part]) for part in parts]
        feedbacks = [
            Feedback(fed[part], right, np.full(len(right), -1, np.int32), top=top)
            for part, right, top in zip(parts, accepted, tops, strict=True)
        ]
        tokens = [[int(fed[part[0]])] for part in parts]
        if together:
            drafter.commit_rows(sessions, tokens, feedbacks)
        else:
            for arguments in zip(sessions, tokens, feedbacks, strict=True):
                arguments[0].commit(*arguments[1:])
        texts = [drafter.start(ids(token), target(60)) for token in range(60)]
        known.append([paths(text.propose(80)) for text in texts])
    assert known[0] == known[1]
    # The accepted five, two rejected ones of the first and third row, the second's only one.
    assert sum(map(bool, known[0])) == 5 + 2 + 1 + 2


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("prompt", [[], [4]])
def test_a_text_of_hardly_any_tokens_is_drafted_for(prompt, learn):
    """Prompts of embeddings have no ids at all."""
    own = dataclasses.replace(target(), learn=learn)
    session = TokenRecyclingDrafter().start(ids(*prompt), own)
    assert len(session.propose(64)) == 0
    feed(session, (3,), (0,), logits_preferring(10, (5, 6)), [5, 3])
    assert drafted(session, 2) == {(5,), (6,)}


@pytest.mark.parametrize(
    "changes", [{"learn": False}, {"expected": (ids(3, 7, 5),)}, {"forms": "of a schema"}]
)
def test_a_text_in_confidence_reads_the_table_and_teaches_it_nothing(changes):
    drafter = TokenRecyclingDrafter(top_k=2, template=(1, 1, 0))
    drafter.start(ids(1, 2), target())
    private = drafter.start(ids(0, 1), dataclasses.replace(target(), **changes))
    assert drafted(private) >= {(2,)}
    private.commit([6, 8], None)
    private.commit([1], None)
    assert drafted(private) >= {(6,), (6, 8)}
    if "expected" in changes:
        private.commit([3], None)
        assert drafted(private) >= {(7,), (7, 5)}
    # Another caller sees what was there before.
    for last, expected in ((3, set()), (7, set()), (0, set()), (6, set()), (1, {(2,)})):
        assert drafted(drafter.start(ids(last), target())) == expected


def test_texts_in_confidence_take_memory_for_what_they_hold():
    """A copy of the table for each row of a batch took 320 MiB with 32 rows."""
    drafter = TokenRecyclingDrafter()
    private = dataclasses.replace(target(vocab_size=262_144), learn=False)
    tables = [drafter.start(ids(*range(20)), private).table for _ in range(32)]
    assert sum(t._successors.nbytes + t._classes.nbytes for t in tables) < 1 << 20
