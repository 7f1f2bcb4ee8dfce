"""The forwards of one call: what runs them, and how one is taken back that a draft has spoilt."""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter
from typing import Any

from ..cache.states import States
from ..host import transformers_private as private
from ..host.feature_taps import FeatureTaps
from ..policy.policy import DraftingPolicy
from ..policy.stats import CallStats
from ..system.log import get_logger
from ..system.memory import SHORTAGES
from ..types.token_tree import Forest
from ..verification.chain_verifier import ChainVerifier
from ..verification.options import Bounds, CallOptions, ForwardOptions
from ..verification.service import PER_TOKEN
from ..verification.tiers import Service
from ..verification.verified import Verified
from ..verification.verifiers import Verifier
from .call import Call
from .walk import Walk

logger = get_logger(__name__)

# Forwards over so few may copy the experts' weights token by token; plain decoding does so for
# one token a row.
_FEW_TOKENS = 2


class UnservableError(Exception):
    """What the prefill has shown of a model that no draft can be verified with."""


class Forwards:
    """Runs a call's forwards; a scope round all of them.

    Args:
        call: whose forwards.
        policy: says what may serve them, and what drafters learn from them.
        service: how the model is served.
        walk: that chooses from their logits.
        several: whether the model is spread over processes, which have to compute the same bits.
        counts: the call's figures.

    Attributes:
        verifier: there is one after the prefill.
        engine: its part in the call.
        cache: that the forwards fill.
        returned_cache: that the result names, in which the call leaves what they filled.
        taps: the hidden states of the last forward that drafters learn from.
        may_draft: whether a draft may be verified: nothing has shown that drafts change the text's
            forwards.
        model_kwargs: the forward's keyword arguments.
    """

    verifier: Verifier

    def __init__(
        self,
        call: Call,
        policy: DraftingPolicy,
        service: Service,
        walk: Walk,
        several: bool,
        counts: CallStats,
    ):
        self._call, self._policy, self._service = call, policy, service
        self._walk, self._several, self._counts = walk, several, counts
        self.model_kwargs = dict(call.model_kwargs)
        room = call.prompt_length + call.room
        self.cache, self.returned_cache = call.engine.slot_cache(
            call.model, self.model_kwargs, service, call.batch_size, room
        )
        self.taps = FeatureTaps(call.model, policy.hidden_layers)
        self._tapped = self.taps if policy.hidden_layers else nullcontext()
        self._decode_scope = private.OptimisedForDecode(call.model)
        wanted = CallOptions(
            reroute=policy.reroute,
            extra_memory=policy.extra_memory,
            several=several,
            batch=call.batch_size,
            select=None if policy.needs_all_logits else walk.rowwise,
        )
        self.engine = call.engine.call(call.model, wanted)
        self.may_draft = True

    def __enter__(self) -> Forwards:
        return self

    def __exit__(self, *error: Any) -> None:
        self._decode_scope.want(False)

    def prefill(self) -> Any:
        """transformers' own prefill.

        Returns:
            What the model returned.

        Raises:
            UnservableError: its layers do not keep one entry for each token.
        """
        call, begun = self._call, perf_counter()
        self.cache.take()
        scope = call.engine.scope(self.engine.by_kernels)
        with self.taps, scope, self.engine.prefill():
            model_kwargs = self.model_kwargs
            outputs = private.prefill(call.model, call.input_ids, call.config, model_kwargs)
        if not self.cache.is_even:
            raise UnservableError("its layers do not keep one entry for each token of the text")
        self.cache.begin(call.batch_size)
        # The verifier counts on from the prompt.
        kept = {name: self.model_kwargs[name] for name in PER_TOKEN & self.model_kwargs.keys()}
        self.model_kwargs = private.kwargs_after(call.model, outputs, self.model_kwargs) | kept
        texts = self.cache, self.model_kwargs, call.input_ids
        try:
            self.verifier = call.engine.verifier(self._service, call.model, *texts, self._options())
        except SHORTAGES as error:
            if self._several:  # others may have enough, and go on with drafts
                raise
            # Plain decoding may have enough. What the layers hold by now is theirs.
            self.may_draft, self.cache.reserved, self.cache.memory = False, None, None
            self._counts.tier, self._counts.reason = "plain", f"no memory to draft in ({error!r})"
            bounds = Bounds(most_fed=1, reach=self._service.reach)
            self.verifier = ChainVerifier(call.model, *texts, bounds, states=States(self.cache))
        shown = perf_counter()
        self.engine.begin(self.verifier, outputs.logits)
        self._counts.count_seconds(prefill=shown - begun, pack=perf_counter() - shown)
        return outputs

    def _options(self) -> ForwardOptions:
        """What this call wants of its forwards."""
        call, policy = self._call, self._policy
        recorded = call.may_record(policy.graphs) and not self._service.foreign
        return ForwardOptions(
            taps=self.taps,
            top_k=policy.top_k,
            capacity=call.prompt_length + call.room,
            cache_outlives_call=call.cache_outlives_call(self._service),
            most_tokens=self.engine.most_tokens,
            recorded=recorded,
            fused=policy.graphs == "fused",
            by_kernels=self.engine.by_kernels,
            states=bool(policy.hidden_layers),
            select=self._walk.rowwise,
            fixed_width=policy.fixed_width,
        )

    def __call__(self, trees: Forest) -> tuple[Forest, Verified]:
        """Verify a tree of every row, or nothing where a forward over them is of no use.

        Returns:
            The trees that were verified, and what the forward showed.
        """
        slots, rows = self.cache.slots, self._walk.rows
        self.cache.require_room(1 + max([slots.lengths[r.index] for r in rows if not r.finished]))
        with self._tapped:
            drafts = len(trees.token_ids) > 0
            verified = self._over_drafts(trees) if drafts else self._run(trees)
            if verified is None:
                trees = Forest.empty(len(rows))
                verified = self._repeat(trees)
        self._counts.forwards += 1
        return trees, verified

    def _run(self, trees: Forest) -> Verified:
        widest = self._policy.fixed_width or 1 + max(trees.sizes)
        few = widest == 1 or widest * len(trees) <= _FEW_TOKENS
        if few != self._decode_scope.wanted:
            self._decode_scope.want(few)
        verified = self.engine.forward(self.verifier, self._walk.rows, trees)
        verified.wait()
        return verified

    def _over_drafts(self, trees: Forest) -> Verified | None:
        """A forward over drafts; None, with nothing of it left, where it did not compute the text
        as it would have done without them."""
        try:
            verified = self._run(trees)
            if verified.is_sound:
                return verified
            self.verifier.drop(self._walk.rows, verified)
            why = "logits behind a draft were not finite (an overflow, or weights that are not)"
        except Exception as error:
            if self._several:
                raise
            self.verifier.undo()
            self.may_draft = False
            # It may take one token of each row only, as plain decoding feeds them.
            self.verifier.narrow()
            why = f"a forward over a draft raised {error!r}"
        name = type(self._call.model).__name__
        logger.warning_once(f"{name}: {why}; the step was repeated without drafts")
        return None

    def _repeat(self, nothing: Forest) -> Verified:
        """The forward once more without the drafts."""
        verified = self._run(nothing)
        # Where the text itself is not finite, no draft is of use.
        self.may_draft = self.may_draft and verified.is_sound
        self._counts.forwards += 1
        verified.typical = False
        return verified

    def catch_up(self, tokens: int) -> None:
        """Feed some of what the cache still lacks of rows of so many generated tokens."""
        self._decode_scope.want(False)
        with self.taps:
            self.verifier.catch_up(self._walk.rows, tokens)

    def dummy_forward(self) -> None:
        """A forward over nothing, because other processes still wait in their own forwards."""
        rows = self._walk.rows
        self._decode_scope.want(False)
        with self.taps:
            nothing = self.verifier.forward(rows, Forest.empty(len(rows)))
        self.verifier.keep(rows, nothing, [[] for _ in rows])

    def end(self, tokens: int) -> None:
        """Leave the cache as plain decoding does after so many generated tokens of every row."""
        verifier, counts = self.verifier, self._counts
        # What was recorded has taken the experts' own method for granted.
        self._decode_scope.want(False)
        verifier.end(tokens)
        counts.attention = verifier.attention_by
        counts.repeated, counts.recordings = verifier.repeated, verifier.recordings
        if self._call.cache_outlives_call(self._service):
            self.cache.give_back()

    def abandon(self) -> None:
        """Leave a cache of the caller's as plain decoding can go on from it."""
        if not self.cache.taken:
            return
        if hasattr(self, "verifier"):
            self.verifier.abandon()
        else:
            self.cache.abandon()
        if private.is_callers(self.returned_cache):
            self.cache.give_back()
