"""What computes a model's forwards on one kind of device, and how it enters a call.

The core's own engine leaves forwards to PyTorch. Others (`engines/`, or another package's, see
:mod:`~..plugins`) extend it; the first that serves a model's device is the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, StaticCache

from ..cache.kv_cache import SlotCache, has_slots
from ..cache.prefixes import release_prefixes
from ..host import transformers_private as private
from ..host.scopes import scopes_left
from ..plugins import every
from ..system.memory import SHORTAGES
from .chain_verifier import ChainVerifier
from .options import CallOptions, ServiceDemand
from .tiers import PER_TOKEN, Service, Tier, cache_for
from .tree_verifier import TreeVerifier
from .verifier import ForwardScope, Verifier


class UnservableError(Exception):
    """What the prefill has shown of a model that no draft can be verified with."""


class Begun(NamedTuple):
    """A call whose prompt is fed.

    Attributes:
        verifier: runs its forwards from now on.
        outputs: what the model returned for the prompt.
        returned_cache: that the result names, in which the call leaves what it has filled.
        why_plain: why no draft is verified; None where drafts may be.
    """

    verifier: Verifier
    outputs: Any
    returned_cache: Any
    why_plain: str | None = None


class Engine:
    """See the module's docstring.

    Attributes:
        first_call: what it does in the first call with a model, for the log.
        packs: whether rows of a batch may be fed behind one another, without padding.
        widens: whether forwards over many tokens take about the time of one.
        has_kernels: whether kernels of its own may compute forwards that transformers' loop asks.
        tree_verifier: what verifies the tree tier's drafts.
    """

    first_call = "measures forwards"
    packs = False
    widens = False
    has_kernels = False
    tree_verifier: type[Verifier] = TreeVerifier

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

    def repeated(self, model: Any, cache: Any) -> Any:
        """What stands for a model in forwards of few tokens over a cache that lies in pages, and
        repeats them from recordings; None: nothing does.

        Args:
            cache: has `slots`, which know the length of the longest text, and `layers`, each with
                its `pools`, keys and values [slots, heads, depth], `shown`, memory for those that
                are seen, which layers may share, and `pages`, which say what is seen.
        """
        return None

    def scope_of(self, model: Any, service: Service, options: CallOptions) -> ForwardScope:
        """What computes the forwards of a call."""
        return ForwardScope()

    def prefill(
        self,
        service: Service,
        model: Any,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        options: CallOptions,
    ) -> Begun:
        """Feed a call's prompt as transformers does, and make what verifies drafts behind it.

        Args:
            service: how the model is served.
            input_ids, config, model_kwargs: as `generate` prepared them.
            options: what the call wants.

        Raises:
            UnservableError: the model's layers do not keep one entry for each token.
        """
        batch, model_kwargs = len(input_ids), dict(model_kwargs)
        slots, returned = self.slot_cache(model, model_kwargs, service, batch, options.capacity)
        scope = self.scope_of(model, service, options)
        try:
            slots.take()
            with options.taps or nullcontext(), scope.prefilling():
                outputs = private.prefill(model, input_ids, config, model_kwargs)
            if not slots.is_even:
                raise UnservableError("its layers do not keep one entry for each token of the text")
            slots.begin(batch)
            # The verifier counts on from the prompt.
            kept = {name: model_kwargs[name] for name in PER_TOKEN & model_kwargs.keys()}
            kwargs = private.kwargs_after(model, outputs, model_kwargs) | kept
            given = model, slots, kwargs, input_ids
            try:
                return Begun(self.verifier(*given, service, options, scope), outputs, returned)
            except SHORTAGES as error:
                if options.several:  # others may have enough, and go on with drafts
                    raise
                why = f"no memory to draft in ({error!r})"
            # Plain decoding may have enough. What the layers hold by now is theirs.
            slots.reserved = slots.memory = None
            chain = replace(service, tier=Tier.CHAIN)
            scope = self.scope_of(model, chain, options)
            verifier = ChainVerifier(*given, chain, options, scope)
            verifier.narrow()
            return Begun(verifier, outputs, returned, why)
        except BaseException:
            if slots.taken:
                slots.abandon()
                if private.is_callers(returned):
                    slots.give_back()
            raise

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
        if private.is_callers(given) or (has_slots(own) and own.get_seq_length()):
            cache = SlotCache.wrapping(own, config, capacity, forgets)
        else:
            if type(own) not in (DynamicCache, StaticCache):
                own = DynamicCache(config=config)
                given = cache_for(model, own)
            made = own.layers if type(own) is DynamicCache else ()
            static = service.static_buffers
            cache = SlotCache(config, 0 if static else capacity, forgets, made, own, static)
            if static:
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
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
        service: Service,
        options: CallOptions,
        scope: ForwardScope,
    ) -> Verifier:
        """What verifies drafts behind a prompt; see :class:`~.verifier.Verifier`."""
        if (fixed := options.fixed_width) is not None:
            raise ValueError(
                "fixed_width: expected None where no memory stays in place, as on a CPU, "
                f"got {fixed}"
            )
        kind = self.tree_verifier if takes_trees(model, service) else ChainVerifier
        return kind(model, cache, model_kwargs, prompt_ids, service, options, scope)

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


def takes_trees(model: Any, service: Service) -> bool:
    """Whether a service's forwards are fed trees."""
    return service.tier is Tier.TREE and private.why_no_mask(model.config) is None


@cache
def _engines() -> tuple[Engine, ...]:
    return (*[make() for make in every("engines")], Engine())


def engine_of(device: torch.device) -> Engine:
    """The engine that computes on a device."""
    return next(engine for engine in _engines() if engine.serves(device))


def release_memory(model: torch.nn.Module) -> None:
    """Give back the memory that calls have left for the next ones with a model.

    That is static buffers and recorded forwards on a GPU, recorded forwards and copies of weights
    on a CPU, and keys and values that `Prefixes` keep. The next call makes them anew, as far as
    they pay; the model is not tested again. A call that runs meanwhile goes on with what it has,
    and leaves it as always. PyTorch's allocator keeps a GPU's memory for the process until
    :func:`torch.cuda.empty_cache`.

    Args:
        model: a model or head, or a module round some.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        release_prefixes(module)
        for engine in _engines():
            engine.release(module)
