"""When a recording is compared, and with what."""

import pytest

from hf_retrieval_assist.verification.recordings import Recording

LIMIT = 100


class Deciding(Recording):
    """What it computes depends on which side of a limit a text's length is; a recording makes a
    constant of that."""

    family = "one"

    def compute(self, asked):
        return asked > LIMIT

    def record(self, asked):
        with self.trying():
            self.content = (asked > LIMIT,)
        return asked > LIMIT

    able = True

    def repeat(self, asked, aside):
        return self.content[0] if self.able else None

    def difference(self, repeated, computed):
        return None if repeated == computed else "another"


def did(recording, alike, *lengths):
    """What it did for texts of these lengths, whose results are right."""
    found = []
    for length in lengths:
        assert recording(length, length, alike) == (length > LIMIT)
        found.append(recording.did)
    return found


def test_a_length_is_compared_once_for_all_of_a_family():
    first, second, other, alike = Deciding(), Deciding(), Deciding(), set()
    other.family = "another"
    assert did(first, alike, 20, 20, 21, 22, 40, 41) == [
        *("recorded", "compared", "compared", "repeated", "compared", "repeated"),
    ]
    assert did(second, alike, 21, 22, 41) == ["recorded", "compared", "repeated"]
    assert did(other, alike, 21, 22, 41) == ["recorded", "compared", "compared"]


def test_a_forward_that_passes_a_decision_is_compared_apart():
    """What is wide stands behind it before its text does."""
    near, wide, alike = Deciding(), Deciding(), set()
    wide.width = 10
    assert did(near, alike, 34, 35, 36) == ["recorded", "compared", "repeated"]
    expected = ["recorded", "compared", "repeated", "compared", "repeated"]
    assert did(wide, alike, 36, 37, 38, 60, 61) == expected


def test_what_could_not_be_repeated_was_not_compared():
    one, alike = Deciding(), set()
    assert did(one, alike, 20, 21, 22) == ["recorded", "compared", "repeated"]
    one.able = False
    assert did(one, alike, 40, 40) == ["compared"] * 2
    one.able = True
    assert did(one, alike, 40, 40) == ["compared", "repeated"]


@pytest.mark.parametrize("first", [20, 200])
def test_what_was_recorded_on_either_side_of_a_decision_is_not_trusted_on_the_other(first):
    """Though others, which were recorded there, are."""
    one, other, alike = Deciding(), Deciding(), set()
    second = 220 - first
    did(one, alike, first, first + 1, first + 1)
    did(other, alike, second, second + 1, second + 1)
    assert other.did == one.did == "repeated"
    assert did(one, alike, second, second) == ["compared", "computed"]
    assert did(other, alike, first, first) == ["compared", "computed"]
