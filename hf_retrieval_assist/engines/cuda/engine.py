"""The engine of CUDA devices: static buffers, recorded there, attention by Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...cache.kv_cache import SlotCache
from ...cache.slot_layers import SlotLayer
from ...host.transformers_private import input_device
from ...verification.engine import Engine
from ...verification.options import CallOptions, ServiceDemand
from ...verification.tiers import Service
from ...verification.verifier import ForwardScope, Verifier
from .fixed_attention import has_triton
from .fixed_memory import can_stay, stays_in_place
from .fixed_verifier import WIDTHS, FixedVerifier
from .node_choices import NodeChoices
from .recorded_drafts import RecordedDrafts
from .workspace import WORKSPACES


class CudaEngine(Engine):
    """See the module's docstring."""

    first_call = "may compile attention (7 s, kept by Triton) and record graphs (0.5 s a width)"
    widens = True

    def serves(self, device: torch.device) -> bool:
        return stays_in_place(device)

    def records(self, model: Any) -> bool:
        return WORKSPACES.records(model, input_device(model))

    def candidates(
        self, model: Any, trees: Sequence[Service], demand: ServiceDemand, packs: bool
    ) -> list[Service]:
        found = [replace(tree, static_buffers=demand.static_buffers) for tree in trees]
        if has_triton(input_device(model)):
            by_triton = [replace(x, static_buffers=True, attention_by="triton") for x in found]
            found = by_triton + found
        return found

    def reserve(self, model: Any, cache: SlotCache, batch: int, capacity: int) -> None:
        found = WORKSPACES.reserve(model, batch, capacity + WIDTHS[-1])
        cache.reserved = found
        if found is not None:
            found.arena.offer([x for x in cache.layers if isinstance(x, SlotLayer)])

    def verifier(
        self,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
        service: Service,
        options: CallOptions,
        scope: ForwardScope,
    ) -> Verifier:
        given = model, cache, model_kwargs, prompt_ids
        if not (service.static_buffers and can_stay(cache, input_device(model))):
            return super().verifier(*given, service, options, scope)
        fixed, tested = options.fixed_width, [width for width in WIDTHS if width <= service.width]
        if fixed not in (None, *tested):
            raise ValueError(f"fixed_width: expected one of {tested}, got {fixed}")
        choose = NodeChoices.of(options.select, fixed)
        return FixedVerifier(*given, service, options, scope, choose=choose)

    def release(self, module: torch.nn.Module) -> None:
        WORKSPACES.release(module)

    def holds(self, cache: SlotCache) -> bool:
        layers = cache.slot_layers
        return bool(layers) and can_stay(cache, layers[0].keys.device)

    def drafts(
        self, model: Any, cache: SlotCache, service: Service, most: int, recorded: bool
    ) -> Any:
        if not can_stay(cache, model.device):
            return None
        return RecordedDrafts(model, cache, service, most, recorded and not service.foreign)
