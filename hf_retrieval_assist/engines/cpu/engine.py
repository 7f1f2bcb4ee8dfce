"""The engine of CPUs: kernels for few rows, copies of weights, packed rows, repeated forwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ...types.row_text import RowText
from ...types.token_tree import Forest
from ...verification.engine import Engine, EngineCall
from ...verification.options import Bounds, CallOptions, ForwardOptions, ServiceDemand
from ...verification.tiers import Service
from ...verification.tree_attention import TreeAttention
from ...verification.verified import Verified
from ...verification.verifiers import Verifier
from .compact import COMPACT
from .copies import Copies
from .few_bits import FewBits
from .norms import learn_norms
from .quantized import IN_FOUR_BITS, WEIGHTS
from .repeated_forward import PROGRAMS
from .reroute import all_scopes_left, reroute
from .skinny import FEW_ROWS, MAX_ROWS
from .tree_verifier import CpuTreeVerifier


class CpuEngine(Engine):
    """See the module's docstring."""

    packs = has_kernels = True

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def prepare(self, model: Any) -> None:
        learn_norms(model)

    def candidates(
        self, model: Any, trees: Sequence[Service], demand: ServiceDemand, packs: bool
    ) -> list[Service]:
        packed = [replace(tree, packed=True) for tree in trees if packs]
        return [*packed, *trees]

    def scopes_left(self) -> AbstractContextManager[None]:
        return all_scopes_left()

    def scope(self, by_kernels: bool, verified: int = 0) -> AbstractContextManager[Any]:
        # Plain decoding of more texts is PyTorch's, and rounds as that.
        few = 0 < verified <= FEW_ROWS
        return reroute(verifying=few) if by_kernels else nullcontext()

    def call(self, model: Any, wanted: CallOptions) -> CpuCall:
        return CpuCall(model, wanted)

    def release(self, module: torch.nn.Module) -> None:
        PROGRAMS.release(module)
        FewBits.release(module)
        for weight in module.parameters(recurse=False):
            for copies in (COMPACT, WEIGHTS, IN_FOUR_BITS):
                copies.release(weight)

    def tree_verifier(
        self,
        service: Service,
        arguments: tuple[Any, ...],
        bounds: Bounds,
        attention: TreeAttention,
        options: ForwardOptions,
        scope: AbstractContextManager[Any],
    ) -> Verifier:
        repeats = options.recorded and options.by_kernels and not options.states
        return CpuTreeVerifier(
            *arguments,
            bounds,
            attention=attention,
            scope=scope,
            packed=service.packed,
            repeats=repeats,
        )


class CpuCall(EngineCall):
    """The kernels' part in one call, and that of copies of its model's weights."""

    def __init__(self, model: Any, wanted: CallOptions):
        self.by_kernels = wanted.reroute
        self._copies: Copies | None = None
        if self.by_kernels:
            if not wanted.several:  # whose processes need not have memory for the same ones
                self._copies = Copies.of(model, wanted.select, wanted.extra_memory)
            # More tokens would not be rounded in half precision as plain decoding rounds them.
            if model.dtype.itemsize < 4 and wanted.batch <= FEW_ROWS:
                self.most_tokens = MAX_ROWS

    def prefill(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._copies is None else self._copies.watching()

    def begin(self, verifier: Verifier, logits: torch.Tensor) -> None:
        if self._copies is not None:
            self._copies.begin(verifier, logits)

    def between_steps(self, verifier: Verifier) -> None:
        super().between_steps(verifier)
        if self._copies is not None:
            self._copies.pack_due()

    def forward(self, verifier: Verifier, rows: Sequence[RowText], trees: Forest) -> Verified:
        if self._copies is None:
            return verifier.forward(rows, trees)
        return self._copies.forward(verifier, rows, trees)

    def cost_variant(self, verifier: Verifier) -> str:
        if self._copies is None:
            return verifier.cost_variant
        return " ".join(filter(None, (self._copies.names, verifier.cost_variant)))
