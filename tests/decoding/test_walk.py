"""Walks along trees whose logits are made by hand."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_retrieval_assist.decoding.dice import Dice
from hf_retrieval_assist.decoding.recorder import OutputRecorder
from hf_retrieval_assist.decoding.selection import TokenSelector
from hf_retrieval_assist.decoding.stopping import Stopping
from hf_retrieval_assist.decoding.walk import Walk
from hf_retrieval_assist.drafters.base import ChildDraw
from hf_retrieval_assist.row_text import RowText
from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification.verified import Verified

VOCAB = 10
# Below the root 1 and 2; below the 1 again 3 and 4; below its 4 a 5.
TREE = TokenTree.build([1, 2, 3, 4, 5], [-1, -1, 0, 0, 3], [0.9, 0.5, 0.8, 0.4, 0.3])


def verified(*best, rows=1, roots=None):
    """A forward after which `best[k]` is the most probable token behind the k-th fed token."""
    logits = torch.zeros(rows, len(best), VOCAB)
    for k, token in enumerate(best):
        logits[:, k, token] = 5.0
    return Verified(logits, roots or [0] * rows, None)


def row_of(*generated, index=0):
    row = RowText(index, torch.tensor([8, 8]), 4)
    row.generated += generated or (7,)
    return row


def walk_one(walk, row, tree, verified, drawn=None):
    """The path of one row; the others rest."""
    trees = [tree] * len(walk.rows)
    for other in walk.rows:
        other.finished = other is not row
    paths = walk(trees, verified, drawn and [drawn] * len(trees))
    for other in walk.rows:
        other.finished = other.finished and other is row
    return paths[row.index]


def walker(rows, processors=(), do_sample=False, criteria=(), streamer=None, **config):
    settings = GenerationConfig(return_dict_in_generate=True, **config)
    return Walk(
        rows,
        TokenSelector(LogitsProcessorList(processors), do_sample, len(rows)),
        Stopping(StoppingCriteriaList(criteria or [MaxLengthCriteria(1000)])),
        OutputRecorder(settings, len(rows)),
        Dice(rows),
        streamer,
    )


@pytest.mark.parametrize(
    ("best", "tokens", "accepted"),
    [
        ((9, 0, 0, 0, 0, 0), [9], [0]),
        ((2, 0, 6, 0, 0, 0), [2, 6], [0, 2]),
        ((1, 3, 0, 8, 0, 0), [1, 3, 8], [0, 1, 3]),
        ((1, 4, 0, 0, 5, 9), [1, 4, 5, 9], [0, 1, 4, 5]),
        # A token that stands in the tree, but not below the node that was reached.
        ((3, 4, 0, 0, 5, 9), [3], [0]),
    ],
)
def test_follows_the_most_probable_tokens(best, tokens, accepted):
    row = row_of()
    path = walk_one(walker([row]), row, TREE, verified(*best))
    assert path.tokens == tokens
    assert path.accepted == accepted
    assert row.generated == [7, *tokens]


def test_without_a_draft():
    row = row_of()
    path = walk_one(walker([row]), row, TokenTree.empty(), verified(6))
    assert (path.tokens, path.accepted) == ([6], [0])


def test_roots_behind_pending_tokens():
    row = row_of()
    path = walk_one(walker([row]), row, TREE, verified(0, 0, 1, 3, 0, 8, 0, 0, roots=[2]))
    assert path.tokens == [1, 3, 8]
    assert path.accepted == [0, 1, 3]


def test_rows_read_their_own_logits():
    rows = [row_of(index=0), row_of(index=1)]
    logits = torch.zeros(2, 3, VOCAB)
    logits[0, 0, 4] = logits[1, 1, 5] = logits[1, 2, 6] = 1
    shown = Verified(logits, [0, 1], None)
    chain = TokenTree.chain([5], [0.5])
    walk = walker(rows)
    assert walk_one(walk, rows[0], chain, shown).tokens == [4]
    assert walk_one(walk, rows[1], chain, shown).tokens == [5, 6]


def test_stops_at_an_end_in_the_middle_of_the_tree():
    row = row_of()
    path = walk_one(
        walker([row], criteria=[EosTokenCriteria(4)]), row, TREE, verified(1, 4, 0, 0, 5, 9)
    )
    # The end was drafted and is right, but plain decoding never feeds it.
    assert path.tokens == [1, 4]
    assert path.accepted == [0, 1]
    assert row.finished


def test_stops_at_the_longest_text():
    row = row_of()
    path = walk_one(
        walker([row], criteria=[MaxLengthCriteria(5)]), row, TREE, verified(1, 4, 0, 0, 5, 9)
    )
    assert path.tokens == [1, 4]
    assert len(row) == 5


class Remembers(LogitsProcessor):
    """Records the prefixes that it is shown, and forbids one token."""

    def __init__(self, forbidden):
        self.forbidden = forbidden
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.tensor([self.forbidden]), -torch.inf)


class Warms(TemperatureLogitsWarper):
    """Unlike its parent, it looks at the text."""

    def __init__(self):
        super().__init__(0.5)
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return super().__call__(input_ids, scores)


def test_descendants_of_processors_that_see_no_text_see_it():
    row, processor = row_of(), Warms()
    walk_one(walker([row], [processor]), row, TREE, verified(1, 4, 0, 0, 5, 9))
    assert processor.seen == [[8, 8, 7], [8, 8, 7, 1], [8, 8, 7, 1, 4], [8, 8, 7, 1, 4, 5]]


def test_processors_see_the_true_prefix_of_every_token():
    row = row_of()
    processor = Remembers(forbidden=1)
    logits = torch.zeros(1, 6, VOCAB)
    logits[0, 0, 1], logits[0, 0, 2] = 5, 4
    logits[0, 2, 9] = 3
    path = walk_one(walker([row], [processor]), row, TREE, Verified(logits, [0], None))
    assert path.tokens == [2, 9]
    assert processor.seen == [[8, 8, 7], [8, 8, 7, 2]]
    # What the model returned is not written to.
    assert torch.isfinite(logits).all()


def test_samples_as_the_plain_loop_does():
    probs = torch.softmax(torch.arange(VOCAB, dtype=torch.float32), -1)
    logits = probs.log().expand(1, 6, VOCAB)
    torch.manual_seed(3)
    drawn = [int(torch.multinomial(torch.softmax(logits[0, :1], -1), 1)) for _ in range(4)]
    torch.manual_seed(3)
    row = row_of()
    tree = TokenTree.chain(drawn[:3], [0.9, 0.8, 0.7])
    path = walk_one(walker([row], do_sample=True), row, tree, Verified(logits.clone(), [0], None))
    assert path.tokens == drawn


def test_residual_sampling_follows_what_was_drawn():
    """Where draft and target agree, the first child is accepted for certain."""
    law = torch.softmax(torch.arange(VOCAB, dtype=torch.float32), -1)
    logits = law.log().expand(1, 2, VOCAB)
    asked = []

    def drawn(tokens):
        asked.append(list(tokens))
        return ChildDraw(law, torch.tensor([3])) if not tokens else None

    row = row_of()
    walk = walker([row], do_sample=True)
    path = walk_one(walk, row, TokenTree.chain([3], [0.9]), Verified(logits, [0], None), drawn)
    assert path.tokens[0] == 3
    assert path.accepted == [0, 1]
    assert asked == [[], [3]]


def test_streams_and_records_every_token():
    got = []
    streamer = SimpleNamespace(put=lambda ids: got.append(ids.tolist()))
    row = row_of()
    walk = walker([row], streamer=streamer, output_scores=True, output_logits=True)
    walk_one(walk, row, TREE, verified(1, 3, 0, 8, 0, 0))
    assert got == [[1], [3], [8]]
    scores = walk.recorder.scores(row)
    assert [int(entry.argmax()) for entry in scores] == [1, 3, 8]
