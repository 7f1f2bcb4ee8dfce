"""When a recording is compared, and with what."""

import pytest

from hf_retrieval_assist.verification.recordings import Recording

LIMIT = 100


class Deciding(Recording):
    """A recording makes a constant of the side of a limit on which a text's length is."""

    able = True

    def __init__(self, like=None):
        super().__init__()
        self.alike = self.alike if like is None else like.alike

    def compute(self, asked):
        return asked > LIMIT

    def record(self, asked):
        with self.trying():
            self.content = (self.compute(asked),)
        return self.compute(asked)

    def repeat(self, asked, aside):
        return self.content[0] if self.able else None

    def difference(self, repeated, computed):
        return None if repeated == computed else "another"


def did(recording, *lengths):
    """What it did for texts of these lengths, whose results are right."""
    found = []
    for length in lengths:
        assert recording(length, [length]) == (length > LIMIT)
        found.append(recording.did)
    return " ".join(found)


def test_a_length_is_compared_once_for_all_of_a_family():
    first = Deciding()
    second, other = Deciding(first), Deciding(first)
    other.family = "another"
    assert did(first, 20, 20, 21, 22, 40) == "recorded compared compared repeated compared"
    assert did(second, 21, 22, 41) == "recorded compared repeated"
    assert did(other, 21, 22, 41) == "recorded compared compared"


def test_what_stands_at_two_lengths_stands_wherever_either_was_recorded():
    first = Deciding()
    second, third = Deciding(first), Deciding(first)
    assert did(first, 10, 20, 20) == "recorded compared repeated"
    assert did(second, 20, 40, 40) == "recorded compared repeated"
    assert did(third, 41, 42, 10) == "recorded compared repeated"


class OfLongest(Deciding):
    """A recording makes a constant of the length of the longest text."""

    def compute(self, asked):
        return max(asked)


def test_texts_that_grow_behind_a_longer_one_that_has_ended_are_repeated_there_alone():
    recording = OfLongest()
    found = []
    for lengths in ([9, 5], [9, 5], [9, 6], [9, 7], [9, 9], [9, 10], [9, 9]):
        assert recording(lengths, lengths) == max(lengths)
        found.append(recording.did)
    assert found == ["recorded", *["compared"] * 2, *["repeated"] * 2, "compared", "computed"]


def test_a_forward_that_passes_a_decision_is_compared_apart():
    """What is wide stands behind it before its text does."""
    near = Deciding()
    wide = Deciding(near)
    wide.width = 10
    assert did(near, 34, 35, 36) == "recorded compared repeated"
    assert did(wide, 36, 37, 38, 60, 61) == "recorded compared repeated compared repeated"


def test_what_could_not_be_repeated_was_not_compared():
    one = Deciding()
    assert did(one, 20, 21, 22) == "recorded compared repeated"
    one.able = False
    assert did(one, 40, 40) == "compared compared"
    one.able = True
    assert did(one, 40, 40) == "compared repeated"


@pytest.mark.parametrize("first", [20, 200])
def test_what_was_recorded_on_either_side_of_a_decision_is_not_trusted_on_the_other(first):
    """Though others, which were recorded there, are."""
    one = Deciding()
    other = Deciding(one)
    second = 220 - first
    did(one, first, first + 1, first + 1)
    did(other, second, second + 1, second + 1)
    assert other.did == one.did == "repeated"
    assert did(one, second, second) == "compared computed"
    assert did(other, first, first) == "compared computed"
