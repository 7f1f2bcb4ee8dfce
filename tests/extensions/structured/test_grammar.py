"""Drafts of what a grammar forces, with a grammar of a few lines in a library's place."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from hf_retrieval_assist import Assistant, SamAssistant, TokenTree
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.call_view import CallView
from hf_retrieval_assist.extensions.structured import grammar
from hf_retrieval_assist.extensions.structured.constraint import DEEPEST, Constraint
from hf_retrieval_assist.policy.policy import Ask, Outcome
from tests.support.lossless import PROMPT, run
from tests.support.one_text import OneText
from tests.support.quick import cases, crossed

# A record of two fields, each of one to three free tokens; 0 ends the text.
KEYS = [[50, 51, 52, 53], [54, 55, 56], [57]]
FREE = range(10, 40)


class Record:
    """Where a text is in the record: which key, how many of its tokens, how many free ones."""

    def __init__(self):
        self.states = [(0, 0, 0)]

    def allowed(self):
        field, key, free = self.states[-1]
        if field == len(KEYS):
            return [0]
        if key < len(KEYS[field]) and not free:
            return [KEYS[field][key]]
        following = [KEYS[field + 1][0]] if field + 1 < len(KEYS) else [0]
        return [*(FREE if free < 3 else ()), *(following if free else ())]

    def advance(self, token):
        if token not in self.allowed():
            return False
        field, key, free = self.states[-1]
        if key < len(KEYS[field]) and not free:
            key += 1
            self.states.append((field + 1, 0, 0) if field == 2 else (field, key, 0))
        elif token in FREE:
            self.states.append((field, key, free + 1))
        else:
            self.states.append((3, 0, 0) if field + 1 == 2 else (field + 1, 1, 0))
        return True


class RecordProcessor(LogitsProcessor):
    """Lets each row write its record; advances by one token a call, as the libraries' do."""

    def __init__(self):
        self.rows = None
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.rows is None:
            self.rows = [Record() for _ in input_ids]
        else:
            for row, ids in zip(self.rows, input_ids, strict=True):
                if row.allowed() != [0]:
                    assert row.advance(int(ids[-1]))
        masked = torch.full_like(scores, -torch.inf)
        for row, one, other in zip(self.rows, masked, scores, strict=True):
            one[row.allowed()] = other[row.allowed()]
        return masked


class RecordConstraint(Constraint):
    def __init__(self):
        self.record = Record()
        self.looked_at = []  # states whose legal tokens were asked for

    def advance(self, token):
        return self.record.advance(token)

    def rollback(self, count):
        if count:
            del self.record.states[-count:]

    def forced(self, limit):
        tokens = []
        while len(tokens) < limit:
            self.looked_at.append(self.record.states[-1])
            allowed = self.record.allowed()
            if len(allowed) > 1 or not self.advance(allowed[0]):
                break
            tokens.append(allowed)
        self.rollback(len(tokens))
        return tokens


@pytest.fixture
def known(monkeypatch):
    """The library of this test is known."""

    def constraint_of(processors, row):
        ours = any(isinstance(processor, RecordProcessor) for processor in processors)
        return RecordConstraint() if ours else None

    monkeypatch.setattr(grammar, "constraint_of", constraint_of)


def check(model, assistant, **options):
    """Outputs are plain's, a processor is called as often, and drafts were accepted."""
    found = []
    for keyword in ({}, {"assistant": assistant}):
        processor = RecordProcessor()
        text = run(model, logits_processor=[processor], max_new_tokens=9, **options, **keyword)
        found.append((text.tolist(), processor.calls))
    assert found[0] == found[1]
    # The first key's; a processor of others may follow all rows of a batch, which is plain then.
    assert assistant.stats.last.accepted >= 3 or len(options["ids"]) > 1


DRAWS = [{}, {"do_sample": True}, {"do_sample": True, "seed": 4}]


@pytest.mark.parametrize(("options", "rows"), cases(crossed(DRAWS, [1, 3]), 3))
def test_keys_are_drafted_and_outputs_are_plains(llama, known, options, rows):
    """No node is spent on what cannot be chosen: drafts are of texts that went on otherwise."""
    others = [[*PROMPT[0].tolist(), 1, 2, 3, 4] * 3]
    for assistant in (Assistant([], budget=8), SamAssistant(others, budget=8)):
        check(llama, assistant, ids=PROMPT.repeat(rows, 1), **options)


CONSTRAINED = Target(vocab_size=67, call=CallView(processors=(RecordProcessor(),)))


def started():
    return OneText(grammar.GrammarDrafter(), [1], CONSTRAINED)


def test_a_text_that_leaves_the_grammar_is_drafted_for_as_any_other(known):
    session = started()
    assert session.propose(2).token_ids.tolist() == [50, 51]
    session.commit([50], None)
    assert session.propose(9).token_ids.tolist() == [51, 52, 53]
    session.commit([7], None)
    assert not len(session.propose(9))
    tree = TokenTree.chain([1, 2], [0.5, 0.5])
    assert session.restrict(tree) is tree


def test_processors_of_no_library_are_left_alone():
    assert not len(started().propose(9))


class Spelling(Constraint):
    """Forces "abcd", letters of which are the tokens 1 to 4, with the tokens 12, 34 and 123."""

    def __init__(self):
        self.cuts = {0: [123, 12, 1], 1: [2], 2: [34, 3], 3: [4]}
        self.lengths = [0]

    def advance(self, token):
        if token not in self.cuts.get(self.lengths[-1], ()):
            return False
        self.lengths.append(self.lengths[-1] + len(str(token)))
        return True

    def rollback(self, count):
        del self.lengths[len(self.lengths) - count :]

    def forced(self, limit):
        found = []
        while len(found) < limit and self.lengths[-1] < 4:
            found.append(self.cuts[self.lengths[-1]])
            assert self.advance(found[-1][0])
        self.rollback(len(found))
        return found


def test_a_forced_text_may_be_cut_otherwise():
    session = grammar.GrammarSession(Spelling())
    tree = session.draft(8)
    assert tree.token_ids.tolist() == [123, 12, 1, 4]
    assert tree.parents.tolist() == [-1, -1, -1, 0]
    assert len(set(tree.classes.tolist())) == 4
    assert tree.fault(1 << 30, 1 << 30) is None
    assert session.draft(2).token_ids.tolist() == [123, 4]
    session.append([12])
    tree = session.draft(8)
    assert tree.token_ids.tolist() == [34, 3]
    session.append([34])
    assert not len(session.draft(8))


class Form:
    """Expects 1, 2, 3, ... whatever came."""

    def __init__(self):
        self.came = []

    def draft(self, budget):
        return TokenTree.chain([1, 2, 3][:budget], [0.9, 0.8, 0.7])

    def append(self, token_ids):
        self.came += token_ids


def test_forms_are_drafted_where_nothing_is_forced():
    form = Form()
    session = grammar.GrammarSession(Spelling(), form)
    assert session.draft(3).token_ids.tolist() == [123, 12, 4]
    session.append([123, 4])
    assert session.draft(3).token_ids.tolist() == [1, 2, 3]
    assert form.came == [123, 4]


class LongText(Constraint):
    """Forces one long text, and remembers of it what a library's matcher does."""

    def __init__(self):
        self.length = self.remembered = 0

    def advance(self, token):
        legal = token == self.length % 60
        self.length += legal
        self.remembered = min(self.remembered + legal, DEEPEST)
        return legal

    def rollback(self, count):
        assert count <= self.remembered
        self.length -= count
        self.remembered -= count

    def forced(self, limit):
        tokens = [[(self.length + n) % 60] for n in range(limit)]
        assert all(self.advance(*cuts) for cuts in tokens)
        self.rollback(limit)
        return tokens


@pytest.mark.parametrize("budget", [512, 640, 5000])
def test_no_deeper_draft_than_a_matcher_can_take_back(budget):
    constraint = LongText()
    session = grammar.GrammarSession(constraint)
    for start in (0, 300):
        tree = session.draft(budget)
        assert tree.token_ids.tolist() == [(start + n) % 60 for n in range(DEEPEST)]
        assert session.restrict(tree) is tree
        session.append(tree.token_ids[:300].tolist())
    deeper = TokenTree.chain([n % 60 for n in range(budget)], [1.0] * budget)
    assert len(session.restrict(deeper)) == DEEPEST
    assert constraint.length == 600


def test_what_is_forced_is_looked_for_once():
    constraint = RecordConstraint()
    session = grammar.GrammarSession(constraint)
    assert session.draft(2).token_ids.tolist() == [50, 51]
    session.append([50])
    assert session.draft(1).token_ids.tolist() == [51]
    assert session.draft(2).token_ids.tolist() == [51, 52]
    session.append([51, 52])
    assert session.draft(1).token_ids.tolist() == [53]
    assert len(constraint.looked_at) == len(set(constraint.looked_at)) == 4


def test_a_text_is_followed_beside_one_that_nothing_constrains(known):
    policy = Assistant([], budget=8).policy
    texts = [policy.start(np.array([1], np.int32), t) for t in (Target(67), CONSTRAINED)]
    policy.learn(None, [Outcome(text, [50]) for text in texts])
    nothing, tree = policy.draft(Ask(texts, budget=4)).trees
    assert len(nothing) == 0
    assert tree.token_ids.tolist()[:3] == [51, 52, 53]
