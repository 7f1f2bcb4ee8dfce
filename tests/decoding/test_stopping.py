"""When rows are finished, decided on texts made by hand."""

import pytest
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_retrieval_assist.decoding.stopping import Stopping
from hf_retrieval_assist.row_text import Path, RowText, strip_padding


def stopping(*criteria):
    return Stopping(StoppingCriteriaList(criteria))


def rows_of(*texts, pad_id=0):
    rows = [RowText(i, torch.tensor([9, 9, 9]), 2, pad_id) for i in range(len(texts))]
    for row, text in zip(rows, texts, strict=True):
        row.generated += text
    return rows


def finished(stop, rows):
    stop.finish(rows, rows, None)
    return [row.finished for row in rows]


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append((input_ids.tolist(), scores))
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("tokens", [3, 4, 5])
@pytest.mark.parametrize(
    "limits",
    [(12, 7), (6.5, 9.0), (7.0, 9.0), (torch.tensor(7), 9.0), (torch.tensor(6.5), 9.0)],
)
def test_longest_text(limits, tokens):
    """A limit of any kind is met where plain decoding meets it."""
    stop = stopping(*map(MaxLengthCriteria, limits), EosTokenCriteria(50))
    row = rows_of([1] * tokens)[0]
    assert (stop.max_length, type(stop.max_length)) == (7, int)
    assert stop.remaining(row) == 4 - tokens
    assert finished(stop, [row]) == [tokens >= 4]


@pytest.mark.parametrize("limits", [(), (float("inf"),), (float("nan"),)])
def test_no_limit(limits):
    stop = stopping(*map(MaxLengthCriteria, limits), EosTokenCriteria(4))
    assert stop.max_length is None
    assert stop.remaining(rows_of([1])[0]) is None


def test_other_criteria_see_the_text_and_the_scores():
    criterion = EndsWith(6)
    stop = stopping(criterion, EosTokenCriteria(4))
    row = rows_of([2, 6])[0]
    stop.finish([row], [row], ("scores",))
    assert row.finished
    assert criterion.shown == [([[9, 9, 9, 2, 6]], ("scores",))]


def test_a_row_ends_where_it_met_its_criteria_first():
    stop = stopping(EndsWith(6), MaxLengthCriteria(50))
    rows = rows_of([1, 6], [1, 1])
    finished(stop, rows)
    rows[0].generated += [2, 2, 6]
    rows[1].generated += [6]
    finished(stop, rows)
    assert [row.met for row in rows] == [2, 3]


@pytest.mark.parametrize(
    ("pad_id", "ended", "tokens"),
    [(0, True, [5, 0, 0]), (0, False, [5, 5, 5]), (None, True, [5, 5, 5])],
)
def test_what_stands_behind_the_end(pad_id, ended, tokens):
    row = rows_of([1, 5], pad_id=pad_id)[0]
    row.finished = ended
    assert row.fed(0, 2) == [1, 5]
    assert row.fed(1, 4) == tokens
    assert row.fed(2, 4) == tokens[1:]


def test_the_text_grows_beyond_its_room_and_can_be_cut():
    row = rows_of([])[0]
    for token in range(9):
        row.generated.append(token)
        assert row.ids.tolist() == [[9, 9, 9, *range(token + 1)]]
    row.cut(2)
    row.generated.append(7)
    assert row.ids.tolist() == [[9, 9, 9, 0, 1, 7]]


def test_prompts_without_their_padding():
    ids = torch.tensor([[0, 0, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert [row.tolist() for row in strip_padding(ids, mask)] == [[3], [4, 5, 6]]
    assert [row.tolist() for row in strip_padding(ids, None)] == [[0, 0, 3], [4, 5, 6]]


def test_behind_the_token_that_ends_a_text_nothing_was_chosen():
    """Its node is kept in the cache, and no token of the text stands behind it."""
    assert Path(3, tokens=[5, 2], accepted=[0, 1, 4]).chosen == [0, 1]
    assert Path(3, tokens=[5, 2, 8], accepted=[0, 1, 4]).chosen == [0, 1, 4]
