"""Smaller copies of a model's weights within a call: its output layer's and its other layers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..row_text import RowText
from ..system.memory import may_take
from ..token_tree import TokenTree
from ..verification.fixed_verifier import FixedVerifier
from ..verification.verified import Verified
from ..verification.verifiers import TreeVerifier, Verifier
from .compact_layers import CompactLayers
from .output_layer import OutputLayer


class Copies:
    """What stands for a model's layers in forwards of a call.

    Args:
        output: for its output layer; None: nothing does.
        compact: for its float32 layers; None: nothing does.
    """

    def __init__(self, output: OutputLayer | None, compact: CompactLayers | None) -> None:
        self._output = output
        self._compact = compact

    @classmethod
    def of(cls, model: Any, screens: bool, extra_memory: int | None) -> Copies:
        """Those that there is memory for.

        Args:
            model: whose layers.
            screens: whether the call needs of its logits no more than which token they choose.
            extra_memory: bytes that copies may take; None: as the machine has them.
        """
        output = OutputLayer.of(model) if screens else None
        if output is not None and not may_take(output.extra_bytes, extra_memory):
            output = None
        compact = CompactLayers.of(model)
        beside = 0 if output is None else output.copy_bytes
        if compact is not None and not may_take(compact.extra_bytes, extra_memory, beside):
            compact = None
        return cls(output, compact)

    def watching(self) -> AbstractContextManager[Any]:
        """Scope of the prompt's forward, which shows what the model does with its logits."""
        return self._output or nullcontext()

    def begin(self, verifier: Verifier, logits: torch.Tensor) -> None:
        """Read copies in forwards to come, those that there are and the prompt's forward has shown
        nothing against."""
        if isinstance(verifier, FixedVerifier):  # recorded or compiled
            self._compact = None
        output = self._output
        if output is not None and not (type(verifier) is TreeVerifier and output.shows(logits)):
            self._output = None
        self._pack(verifier, lambda copy: copy.extra_bytes == 0)

    def pack_due(self, verifier: Verifier) -> None:
        """Make the copies that have become worth it; to be called once for each forward."""
        self._pack(verifier, lambda copy: not copy.serves and copy.is_worth_packing())

    def _pack(
        self, verifier: Verifier, chosen: Callable[[OutputLayer | CompactLayers], bool]
    ) -> None:
        due = [copy for copy in (self._output, self._compact) if copy is not None and chosen(copy)]
        for copy in due:
            copy.pack()
            if not copy.serves:  # the values of all weights need float32
                self._compact = None
        if due:
            self._name_manner(verifier)

    def _name_manner(self, verifier: Verifier) -> None:
        """Say what is read in forwards to come, which then have a time of their own."""
        copies = {"screened": self._output, "compact": self._compact}
        names = [name for name, copy in copies.items() if copy is not None and copy.serves]
        verifier.manner = " ".join(names)

    def forward(
        self, verifier: Verifier, rows: Sequence[RowText], trees: Sequence[TokenTree]
    ) -> Verified:
        """The verifier's forward, with copies in the place of layers."""
        with self._compact or nullcontext():
            output = self._output
            if output is None:
                return verifier.forward(rows, trees)
            with output:
                verified = verifier.forward(rows, trees)
            if output.shows(verified.outputs.logits):
                verified.screened = output.screened
                return verified
            # The model makes something else of its logits, this time.
            self._output = None
            self._name_manner(verifier)
            if output.screened is None:
                return verified
            assert isinstance(verifier, TreeVerifier)
            verifier.forget()
            return verifier.forward(rows, trees)
