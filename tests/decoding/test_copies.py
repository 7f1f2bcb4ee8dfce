"""Which copies of a model's weights a call reads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from hf_retrieval_assist.decoding.copies import Copies
from hf_retrieval_assist.verification.fixed_verifier import FixedVerifier
from hf_retrieval_assist.verification.verifiers import ChainVerifier, TreeVerifier


class Copy:
    """A copy that notes what is done with it, and of whose logits others may be made."""

    copy_bytes = 50
    screened = "rows"

    def __init__(self, extra_bytes: int = 100, due: bool = True, shows: bool = True) -> None:
        self.extra_bytes, self.due, self.shown = extra_bytes, due, shows
        self.serves = False
        self.entered = 0

    def pack(self) -> None:
        self.serves = True

    def is_worth_packing(self) -> bool:
        return self.due

    def shows(self, logits: Any) -> bool:
        return self.shown

    def __enter__(self) -> Copy:
        self.entered += 1
        return self

    def __exit__(self, *error: object) -> None: ...


def verifier(kind: type = TreeVerifier) -> Any:
    made = kind.__new__(kind)
    if kind is not FixedVerifier:  # which names its own
        made.manner = ""
    made.forward = mock.Mock()
    made.forget = mock.Mock()
    return made


def copies(output: Copy | None, compact: Copy | None) -> Copies:
    return Copies(output, compact)  # type: ignore[arg-type]


LOGITS = torch.zeros(1)


def test_nothing_stands_for_a_layer_unless_told() -> None:
    served, none = verifier(), copies(None, None)
    with none.watching():
        none.begin(served, LOGITS)
    none.pack_due(served)
    assert none.forward(served, [], []) is served.forward.return_value
    assert served.manner == ""


def test_copies_that_there_are_serve_at_once_and_others_when_they_are_worth_it() -> None:
    output, compact, served = Copy(extra_bytes=0), Copy(due=False), verifier()
    both = copies(output, compact)
    both.begin(served, LOGITS)
    assert (output.serves, compact.serves, served.manner) == (True, False, "screened")
    both.pack_due(served)
    assert not compact.serves
    compact.due = True
    both.pack_due(served)
    assert served.manner == "screened compact"
    verified = both.forward(served, [], [])
    assert verified.screened == "rows"
    assert (output.entered, compact.entered) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "entered"), [(TreeVerifier, 1), (ChainVerifier, 0), (FixedVerifier, 0)]
)
def test_the_output_layer_is_read_in_full_unless_trees_are_verified(
    kind: type, entered: int
) -> None:
    output, served = Copy(extra_bytes=0), verifier(kind)
    found = copies(output, None)
    found.begin(served, LOGITS)
    found.forward(served, [], [])
    assert output.entered == entered


def test_recorded_forwards_read_no_compact_layers() -> None:
    compact, served = Copy(extra_bytes=0), verifier(FixedVerifier)
    found = copies(None, compact)
    found.begin(served, LOGITS)
    found.forward(served, [], [])
    assert (compact.serves, compact.entered) == (False, 0)


@pytest.mark.parametrize("screened", ["rows", None])
def test_a_forward_is_fed_anew_whose_model_has_changed_screened_logits(screened: Any) -> None:
    output, served = Copy(extra_bytes=0), verifier()
    found = copies(output, None)
    found.begin(served, LOGITS)
    output.shown, output.screened = False, screened
    found.forward(served, [], [])
    assert served.forget.called == (screened is not None)
    assert served.forward.call_count == (2 if screened else 1)
    assert served.manner == ""
    found.forward(served, [], [])
    assert output.entered == 1


@pytest.mark.parametrize(
    ("limit", "read"), [(0, ()), (60, ("output",)), (1000, ("output", "compact"))]
)
def test_memory_that_copies_may_take(limit: int, read: tuple[str, ...]) -> None:
    where = "hf_retrieval_assist.decoding.copies."
    output, compact = Copy(extra_bytes=50), Copy(extra_bytes=100)
    with (
        mock.patch(where + "OutputLayer.of", return_value=output),
        mock.patch(where + "CompactLayers.of", return_value=compact),
    ):
        found = Copies.of(None, True, limit)
        found.begin(verifier(), LOGITS)
        found.pack_due(verifier())
        assert (output.serves, compact.serves) == ("output" in read, "compact" in read)
        output.serves = False
        Copies.of(None, False, 1000).pack_due(verifier())
        assert not output.serves
