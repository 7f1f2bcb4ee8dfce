"""The engine of CPUs: kernels for few rows, copies of weights, packed rows, repeated forwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ...host.callers_code import has_callers_code
from ...host.transformers_private import attention_of, hooks_of
from ...structures.modules import modules_of
from ...verification.engine import Engine
from ...verification.options import CallOptions, ServiceDemand
from ...verification.tiers import Service
from ...verification.verifier import ForwardScope
from .compact import COMPACT
from .copies import release_compact
from .few_bits import FewBits
from .norms import learn_norms
from .quantized import IN_FOUR_BITS, WEIGHTS
from .repeated_forward import PROGRAMS, RepeatedForward
from .reroute import all_scopes_left, reroute
from .tree_verifier import CpuTreeVerifier, KernelScope, are_few


class CpuEngine(Engine):
    """See the module's docstring."""

    packs = has_kernels = True
    tree_verifier = CpuTreeVerifier

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
        return reroute(verifying=are_few(verified)) if by_kernels else nullcontext()

    def repeated(self, model: Any, cache: Any) -> RepeatedForward | None:
        if attention_of(model.config) != "sdpa" or hooks_of(*modules_of(model)):
            return None
        repeated = RepeatedForward(model, model, cache, {"cache": type(cache).__name__}, None)
        hopes = repeated.repeats or (repeated.widths and not has_callers_code(model))
        return repeated if hopes else None

    def scope_of(self, model: Any, service: Service, options: CallOptions) -> ForwardScope:
        return KernelScope(model, options) if options.reroute else ForwardScope()

    def release(self, module: torch.nn.Module) -> None:
        PROGRAMS.release(module)
        FewBits.release(module)
        release_compact(module)
        for weight in module.parameters(recurse=False):
            for copies in (COMPACT, WEIGHTS, IN_FOUR_BITS):
                copies.release(weight)
