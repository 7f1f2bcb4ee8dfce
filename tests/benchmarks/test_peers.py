"""Published drafters by their papers' rules, on texts small enough to draft for by hand."""

import numpy as np
import pytest
import torch

from benchmarks import peers
from hf_retrieval_assist.drafters.base import Feedback
from hf_retrieval_assist.verification.verified import TopLogits

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model
from ..support.trees import paths

pytestmark = pytest.mark.slow

B = peers.BREADTH


def showing(tokens, likeliest):
    """Feedback on a forward over `tokens`, by what was likeliest behind each."""
    ids = np.array(likeliest, np.int64).reshape(-1, B)
    fed = np.array(tokens, np.int32)
    top = TopLogits(np.zeros(ids.shape, np.float32), ids=ids)
    chain = np.arange(len(fed), dtype=np.int32)
    return Feedback(fed, chain, chain - 1, top=top)


def racer(prompt, last, tokens=(), likeliest=()):
    session = peers.RacerSession(prompt, {}, vocab_size=5000)
    session.append([last], showing(tokens, likeliest))
    return session


def test_racer_halves_what_each_sibling_may_have_below_it():
    def children(token):
        return [B * token + i for i in range(1, B + 1)]

    known = range(600)
    session = racer([], 0, known, [children(token) for token in known])
    for budget in (1, B, 20, 60):
        tree = session.draft(budget)
        assert tree.fault(1 << 30, 1 << 30) is None
        assert len(tree) == budget
    drafted = paths(session.draft(60))
    counts = [sum(path[:-1] == (child,) for path in drafted) for child in children(0)]
    assert counts == [8, 4, 2, 1, 1, 1, 1, 1]
    deeper = [sum(path[:-1] == (1, child) for path in drafted) for child in children(1)]
    assert deeper == [4, 2, 1, 1, 1, 1, 1, 1]
    assert drafted[:B] == [(child,) for child in children(0)]


def test_racer_takes_the_most_frequent_of_what_followed_two_tokens_or_more():
    often, once = [1, 2, 3, *range(50, 58)], [1, 2, 4, *range(60, 68)]
    prompt = [*often, *once, *often, 9, 1]
    assert paths(racer(prompt, 2).draft(1)) == [(3,)]
    drafted = paths(racer(prompt, 2).draft(40))
    assert drafted[:8] == [tuple([3, *range(50, 57)][:end]) for end in range(1, 9)]
    # Patterns are ten tokens long, two of which are the match.
    assert drafted[8:] == [tuple([4, *range(60, 67)][:end]) for end in range(1, 9)]
    # One token alone is no match, and a pattern begins only where ten tokens follow.
    assert paths(racer([*often, 9], 2).draft(40)) == []
    assert paths(racer([*often[:7], 1], 2).draft(40)) == []
    # It fills up beside what it retrieved.
    session = racer([*often, 1], 2, [2], [[3, 70, 71, 72, 73, 74, 75, 76]])
    assert paths(session.draft(3)) == [(3,), (3, 50), (3, 50, 51)]
    assert paths(session.draft(11))[8:] == [(70,), (71,), (72,)]
    assert len(session.draft(40)) == 8 + 7


VOCABULARY = 30
FILL = range(VOCABULARY - B, VOCABULARY)  # named where a test names nothing more likely
EAST, NORTH = torch.eye(VOCABULARY)[:2]


class Identity:
    """Stands for a model: its last states are its logits."""

    embeddings = torch.eye(VOCABULARY)
    embeddings[7] += 0.2 * embeddings[3]  # a little like it

    def get_input_embeddings(self):
        return torch.nn.Embedding.from_pretrained(self.embeddings)

    def get_output_embeddings(self):
        return torch.nn.Identity()


def adapld(text, states, named=None):
    """A session for a text whose last token was not fed; `named`: what is likeliest by place."""
    last = torch.zeros(len(states), VOCABULARY)
    for place in range(len(states)):
        names = [*(named or {}).get(place, []), *FILL]
        last[place, names] = -torch.arange(len(names)) + 2.0 * B
    session = peers.AdaPldSession(np.array(text[:-1], np.int32), Identity())
    fed = np.arange(len(states), dtype=np.int32)
    hidden = torch.cat([torch.stack(states), last], dim=-1)
    session.append(text[-1:], Feedback(fed, fed, fed - 1, hidden_states=hidden))
    return session


def test_adapld_copies_behind_the_equal_token_whose_context_is_nearest():
    text = [0, 5, 11, 1, 5, 12, 2, 5]
    states = [EAST, EAST, EAST, NORTH, EAST, EAST, 0.9 * EAST + 0.1 * NORTH]
    assert (11, 1, 5) in paths(adapld(text, states).draft(60))
    states[-1] = 0.1 * EAST + 0.9 * NORTH
    drafted = paths(adapld(text, states).draft(60))
    assert (12, 2, 5) in drafted
    assert (11,) not in drafted


def test_adapld_branches_by_what_was_likeliest_at_the_anchor():
    text = [0, 5, 11, 13, 8, 14, 5]
    tree = adapld(text, [EAST] * 6, {1: [11, 8, 6]}).draft(60)
    assert tree.fault(1 << 30, 1 << 30) is None
    copied = {tuple([11, 13, 8, 14, 5][:end]) for end in range(1, 6)}
    # 8 stands in the text, before 14; 6 does not.
    assert set(paths(tree)) == copied | {(8,), (8, 14), (6,)} | {(token,) for token in FILL[:-3]}
    assert len(adapld(text, [EAST] * 6).draft(3)) == 3


def test_adapld_without_a_match_takes_a_place_with_a_token_of_like_embedding():
    branches = [(11,), (11, 13), (12,), *[(token,) for token in FILL[:-2]]]
    text = [0, 3, 11, 13, 7]
    # It branches there and copies nothing.
    assert sorted(paths(adapld(text, [EAST] * 4, {1: [11, 12]}).draft(60))) == sorted(branches)
    assert paths(adapld([0, 4, 11, 13, 7], [EAST] * 4).draft(60)) == []


def test_peers_write_plains_tokens_within_their_nodes(monkeypatch):
    monkeypatch.setattr(peers, "load", lambda arguments: small_model())
    report = peers.run(quick(), silent)
    (table,) = report.tables
    whole = {row["method"]: row for row in table.rows if row["category"] == "all"}
    assert [*whole] == [method.name for method in peers.methods(8, small_model()[0])]
    assert {row["same"] for row in whole.values()} == {"2 of 2"}
    assert whole["plain"]["per_forward"] == 1
    assert {row["nodes"] for row in table.rows} == {8}
    # A small random model repeats itself.
    assert all(1.2 < row["per_forward"] <= 9 for row in [*whole.values()][1:])
