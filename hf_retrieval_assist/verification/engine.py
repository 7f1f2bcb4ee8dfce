"""What computes a model's forwards on one kind of device, and how it enters a call.

The core's own engine leaves forwards to PyTorch. Others (`engines/`, or another package's, see
:mod:`~..plugins`) extend it; the first that serves a model's device is the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from ..cache.kv_cache import SlotCache, has_slots
from ..cache.states import SavedStates, States
from ..host.scopes import scopes_left
from ..host.transformers_private import input_device, is_callers, why_no_mask
from ..plugins import every
from ..types.row_text import RowText
from ..types.token_tree import Forest
from .chain_verifier import ChainVerifier
from .options import Bounds, CallOptions, ForwardOptions, ServiceDemand
from .tiers import Service, Tier, cache_for, has_padding
from .tree_attention import TreeAttention
from .verified import Verified
from .verifiers import TreeVerifier, Verifier


class EngineCall:
    """An engine's part in one call; here none.

    Attributes:
        by_kernels: whether the engine's own kernels compute forwards.
        most_tokens: see :class:`~.options.Bounds`.
    """

    by_kernels = False
    most_tokens: int | None = None

    def prefill(self) -> AbstractContextManager[Any]:
        """Scope of the prompt's forward, inside of the engine's own."""
        return nullcontext()

    def begin(self, verifier: Verifier, logits: torch.Tensor) -> None:
        """The prompt's forward gave these logits, and a verifier goes on."""

    def between_steps(self, verifier: Verifier) -> None:
        """Make what the step needs and what has become worth it; called once for each."""
        verifier.prepare()

    def forward(self, verifier: Verifier, rows: Sequence[RowText], trees: Forest) -> Verified:
        """The verifier's forward."""
        return verifier.forward(rows, trees)

    def cost_variant(self, verifier: Verifier) -> str:
        """How the next forward runs; t(n) is measured for each way."""
        return verifier.cost_variant


class Engine:
    """See the module's docstring.

    Attributes:
        first_call: what it does in the first call with a model, for the log.
        packs: whether rows of a batch may be fed behind one another, without padding.
        widens: whether forwards over many tokens take about the time of one.
        has_kernels: whether kernels of its own may compute forwards that transformers' loop asks.
    """

    first_call = "measures forwards"
    packs = False
    widens = False
    has_kernels = False

    def serves(self, device: torch.device) -> bool:
        """Whether it computes on a device."""
        return True

    def prepare(self, model: Any) -> None:
        """Learn of a model what its test and its forwards need."""

    def records(self, model: Any) -> bool:
        """Whether its forwards are worth static buffers, to be recorded there."""
        return False

    def candidates(
        self, model: Any, trees: Sequence[Service], demand: ServiceDemand, packs: bool
    ) -> list[Service]:
        """Ways of the tree tier that the model's test may examine, best first.

        Args:
            trees: those that the core has.
            packs: whether rows of a batch may be fed behind one another.
        """
        return list(trees)

    def scopes_left(self) -> AbstractContextManager[None]:
        """Scope at whose end the running thread is in the scopes that it was in before."""
        return scopes_left()

    def scope(self, by_kernels: bool, verified: int = 0) -> AbstractContextManager[Any]:
        """Scope in which a model's forwards are computed, by the engine's kernels where wanted; it
        may be entered again and again.

        Args:
            verified: texts whose drafts are verified there; 0: it is plain decoding's.
        """
        return nullcontext()

    def call(self, model: Any, wanted: CallOptions) -> EngineCall:
        """Its part in a call."""
        return EngineCall()

    def slot_cache(
        self, model: Any, model_kwargs: dict[str, Any], service: Service, batch: int, capacity: int
    ) -> tuple[SlotCache, Any]:
        """Put a slot cache in the place of the one that `generate` prepared.

        Args:
            model_kwargs: `generate`'s, with the cache under the service's name for it.
            service: that will verify with it.
            batch: rows.
            capacity: slots that each row will need, as far as that is known.

        Returns:
            The slot cache, and what the call leaves: the one that was there, where it stands for
            that.
        """
        config = model.config.get_text_config(decoder=True)
        name, forgets = service.cache_name, service.forgets(batch)
        given: Any = model_kwargs.get(name)
        own = getattr(given, "self_attention_cache", given)
        # Parts of a prompt may be there already.
        if is_callers(given) or (has_slots(own) and own.get_seq_length()):
            cache = SlotCache.wrapping(own, config, capacity, forgets)
        else:
            if type(own) not in (DynamicCache, StaticCache):
                own = DynamicCache(config=config)
                given = cache_for(model, own)
            made = own.layers if type(own) is DynamicCache else ()
            cache = SlotCache(config, 0 if service.static_buffers else capacity, forgets, made)
            cache.lender, cache.static_buffers = own, service.static_buffers
            if service.static_buffers:
                self.reserve(model, cache, batch, capacity)
        model_kwargs[name] = cache
        if isinstance(given, EncoderDecoderCache):
            model_kwargs[name] = EncoderDecoderCache(cache, given.cross_attention_cache)
            model_kwargs[name].is_updated = given.is_updated
        return cache, given

    def reserve(self, model: Any, cache: SlotCache, batch: int, capacity: int) -> None:
        """Let a cache of static buffers begin where an earlier call was served."""

    def verifier(
        self,
        service: Service,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
        options: ForwardOptions,
    ) -> Verifier:
        """The verifier of a service, for one call whose prefill is done."""
        if (fixed := options.fixed_width) is not None:
            raise ValueError(
                "fixed_width: expected None where no memory stays in place, as on a CPU, "
                f"got {fixed}"
            )
        arguments = model, cache, model_kwargs, prompt_ids
        bounds = Bounds(service.width, options.most_tokens, service.reach)
        scope = self.scope(options.by_kernels, len(prompt_ids))
        if service.tier is not Tier.TREE or why_no_mask(model.config) is not None:
            states = SavedStates if service.tier is Tier.REPLAY else States
            return ChainVerifier(*arguments, bounds, states=states(cache), scope=scope)
        attention = tree_attention(service, model, model_kwargs)
        return self.tree_verifier(service, arguments, bounds, attention, options, scope)

    def tree_verifier(
        self,
        service: Service,
        arguments: tuple[Any, ...],
        bounds: Bounds,
        attention: TreeAttention,
        options: ForwardOptions,
        scope: AbstractContextManager[Any],
    ) -> Verifier:
        """One of the tree tier; `arguments` are a verifier's first four."""
        return TreeVerifier(*arguments, bounds, attention=attention, scope=scope)

    def release(self, module: torch.nn.Module) -> None:
        """Drop what is kept of a module, none of its children's, for calls to come."""

    def holds(self, cache: SlotCache) -> bool:
        """Whether a cache's layers may stay in memory in which forwards are recorded."""
        return False

    def drafts(
        self, model: Any, cache: SlotCache, service: Service, most: int, recorded: bool
    ) -> Any:
        """What runs a draft model's forwards in static buffers; None: it is run as it is.

        Args:
            cache: of the texts that it drafts for.
            service: how the model is fed trees.
            most: tokens of each row that are fed before some are kept at most.
            recorded: whether forwards may be repeated from a recording.
        """
        return None


def tree_attention(service: Service, model: Any, model_kwargs: dict[str, Any]) -> TreeAttention:
    """The masks of a service's trees behind the prompts of a call."""
    mask = None
    if has_padding(model_kwargs):
        mask = model_kwargs["attention_mask"].bool().to(input_device(model))
    return TreeAttention(service.rules, mask, model.dtype)


@cache
def _engines() -> tuple[Engine, ...]:
    return (*[make() for make in every("engines")], Engine())


def engine_of(device: torch.device) -> Engine:
    """The engine that computes on a device."""
    return next(engine for engine in _engines() if engine.serves(device))


def release_memory(model: torch.nn.Module) -> None:
    """Give back the memory that calls have left for the next ones with a model.

    That is static buffers and recorded forwards on a GPU, recorded forwards and copies of weights
    on a CPU. The next call makes them anew, as far as they pay; the model is not tested again. A
    call that runs meanwhile goes on with what it has, and leaves it as always. PyTorch's allocator
    keeps a GPU's memory for the process until :func:`torch.cuda.empty_cache`.

    Args:
        model: a model or head, or a module round some.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for engine in _engines():
        for module in model.modules():
            engine.release(module)
