"""Texts that one drafter drafts for, told by hand, together or one by one."""

import torch

from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.drafters.base import Target

from .feature_following import assert_same, features_of, seen
from .lossless import build
from .one_text import OneText
from .tiny_models import VOCAB

# Known of each text when it starts.
LENGTHS = [3, 9, 1, 17, 9, 30, 5, 12]
ROWS = list(range(len(LENGTHS)))

# How the first text goes on in the end: by tokens whose hidden states nobody knows, then by others.
# Twice nothing is new; once a long piece was not drafted.
AFTER = ((0, 0), (0, 0), (0, 90), (5, 6), (0, 2), (0, 2))


class Texts:
    """A drafter, and texts by their row.

    Attributes:
        tokens: of each text so far.
        sessions: of those that have begun and have not ended.
        features: the hidden states of each text, where the drafter follows them.
    """

    def __init__(self, drafter, target=None, budget=12):
        self.drafter, self.target, self.budget = drafter, target, budget
        generators = [torch.Generator().manual_seed(row) for row in ROWS]
        self._words = [torch.randint(1, VOCAB, (300,), generator=g).tolist() for g in generators]
        layers = drafter.needs.hidden_layers
        self.features = [features_of(target, layers, w) if layers else None for w in self._words]
        self.tokens, self.sessions = {}, {}

    def _seen(self, row, first, last):
        features = self.features[row]
        return None if features is None else seen(features[first:last])

    def fresh(self, row):
        """A session that is told a text's tokens so far at once."""
        *prompt, last = self.tokens[row]
        target = Target(VOCAB, model=self.target)
        session = OneText(self.drafter, prompt, target)
        session.commit([last], self._seen(row, 0, len(prompt)))
        return session

    def start(self, *rows):
        for row in rows:
            self.tokens[row] = self._words[row][: LENGTHS[row] + 1]
            self.sessions[row] = self.fresh(row)

    def add(self, row, new, told=True):
        """A text goes on with these tokens; `told`: with the hidden states before them."""
        first = len(self.tokens[row]) - 1
        feedback = self._seen(row, first, first + len(new)) if told else None
        self.tokens[row] += new
        self.sessions[row].commit(new, feedback)

    def grow(self, row, count, told=True):
        """A text goes on by so many of its own tokens."""
        known = len(self.tokens[row])
        self.add(row, self._words[row][known : known + count], told)

    def accept(self, row, tree, count):
        """A text accepts the beginning of the deepest path, and goes on with another token."""
        path = tree.path(int(tree.depths.argmax()))[:count]
        self.add(row, [*tree.token_ids[path].tolist(), 1 + (7 * row + len(self.tokens[row])) % 50])

    def leave(self, row):
        self.sessions.pop(row).close()

    def propose(self, rows):
        sessions = [self.sessions[row].session for row in rows]
        return self.drafter.propose(sessions, [self.budget] * len(rows))

    def conversation(self, rows, turns=6):
        """What is drafted for texts that go on, some of which join late, wait, or leave."""
        drafts = []
        self.start(*rows)
        for turn in range(turns):
            asked = [row for row in self.sessions if turn > 1 or row not in rows[1:2]]
            trees = dict(zip(asked, self.propose(asked), strict=True))
            for row in self.sessions:
                if row in trees and self.features[row] is None:
                    self.accept(row, trees[row], (row + turn) % 4)
                else:
                    self.grow(row, 1 + (row + turn) % 3)
            drafts += trees.values()
            if turn == 3 and len(self.sessions) > 2:
                self.leave(max(self.sessions))
        for unknown, known in AFTER:
            if unknown:
                self.grow(rows[0], unknown, told=False)
            if known:
                self.grow(rows[0], known)
            drafts += self.propose(list(self.sessions))
        for row in list(self.sessions):
            self.leave(row)
        return drafts


DRAFT_MODELS = ("LlamaForCausalLM", "Gemma3ForCausalLM")


def drafting(name):
    """Texts of a draft model whose layers see everything, or windows that trees are deeper than."""
    windows = {"sliding_window": 2} if name == "Gemma3ForCausalLM" else {}
    model = build(name, **windows)
    return Texts(DraftModelDrafter(model, max_nodes=12, max_levels=4, width=3))


def assert_same_drafts(drafts, expected):
    for tree, other in zip(drafts, expected, strict=True):
        assert tree.classes.tolist() == other.classes.tolist()
        assert_same(tree, other)
