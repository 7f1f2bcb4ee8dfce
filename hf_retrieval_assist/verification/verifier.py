"""How one forward checks drafts and how the cache forgets what was rejected.

A verifier feeds every row its pending tokens (the ones the model has not processed, the root being
the last of them) followed by a draft, and later keeps what was accepted. What it feeds, and in what
shape, is decided by :mod:`.tree_verifier`, by :mod:`.chain_verifier`, and by engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..cache.blocks import Views
from ..cache.kv_cache import SlotCache
from ..cache.slot_layers import NO_VIEWS
from ..host.transformers_private import (
    CACHE_NAMES,
    OptimisedForDecode,
    attention_of,
    forward_parameters,
    input_device,
)
from ..system.lazy import cached_property
from ..system.log import get_logger
from ..types.row_text import RowText
from ..types.token_tree import Forest, Limits
from .options import CallOptions
from .reach import UNLIMITED
from .tiers import Service
from .verified import Verified

logger = get_logger(__name__)

# Tokens per row that one forward catches up on at most, since each of them gets logits.
_MOST_FED = 64

# Forwards over so few may copy the experts' weights token by token; plain decoding does so for
# one token a row.
_FEW_TOKENS = 2


class ForwardScope:
    """What computes the forwards of one call; here PyTorch, as the model asks.

    Attributes:
        most_tokens: tokens of all rows, filler included, that a forward may feed where it is to
            round as plain decoding does; None: any number.
    """

    most_tokens: int | None = None

    def prefilling(self) -> AbstractContextManager[Any]:
        """Scope of the prompt's forward."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[Any]:
        """Scope of a later one, whoever wants it."""
        return nullcontext()


class Verifier:
    """What a call's forwards run by: it owns the cache, the scope they are computed in, and what
    was recorded of them.

    Args:
        model: a transformers model.
        cache: its self-attention cache, filled by the prefill.
        model_kwargs: `generate`'s, after the prefill.
        prompt_ids: int64 [batch, length], as the rows of text begin.
        service: how the model is served.
        options: what the call wants.
        scope: what computes the forwards.

    Attributes:
        begun: slots per row that held the prompt.
        widths: the numbers of tokens per row, or of all packed rows, that forwards are filled up
            to; what is wider, or any number where there are none, is fed as it is.
        feeding: whether a forward has begun whose tokens are neither kept nor dropped yet.
        packed: whether a forward costs what all rows feed together, so that rows which have ended
            cost nothing; otherwise it is as wide as the widest row.
        most_fed: tokens of each row that a forward may feed.
        most_tokens: see :class:`ForwardScope`.
        reach: how far a forward may reach.
        may_draft: whether a draft may be verified: nothing has shown that drafts change the text's
            forwards.
        chains: whether drafts have to be single paths.
        attention_by: what computes attention.
        cost_variant: how forwards run; the cost of a width is its own.
        forwards: behind the prefill, so far.
        repeated, recordings: forwards that were repeated from a recording, and recordings that were
            made.
    """

    packed = False
    chains = False
    forwards = repeated = recordings = 0

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
        service: Service,
        options: CallOptions,
        scope: ForwardScope,
    ):
        self.model, self.service, self.options, self.scope = model, service, options, scope
        self.most_fed, self.reach = service.width, service.reach
        self.most_tokens = scope.most_tokens
        self.may_draft = True
        self.widths: tuple[int, ...] = ()
        self.cache = cache
        self.prompt_ids = prompt_ids
        self.device = input_device(model)
        self.attention_by = attention_of(model.config)
        self.positions = model_kwargs.get("position_ids")
        if self.positions is not None:
            self.next_position = self.positions[..., -1:].to(self.device) + 1
        self.kwargs = {
            name: value
            for name, value in model_kwargs.items()
            if name not in ("position_ids", "logits_to_keep", "inputs_embeds", "cache_position")
        }
        if "output_router_logits" in forward_parameters(model):
            # A loss of training is computed from them, which no call returns, and which fails over
            # several tokens behind others.
            self.kwargs["output_router_logits"] = False
        self._ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        self._steady: dict[str, Any] | None = None
        self.begun = cache.slots.longest
        self.feeding = self._ready = False
        self._tapped: AbstractContextManager[Any] = nullcontext()
        if options.taps is not None and options.taps.layers:
            self._tapped = options.taps
        self._decode_scope = OptimisedForDecode(model)

    @property
    def cost_variant(self) -> str:
        return ""

    def ready(self) -> None:
        """Make what forwards behind the prompt's need, for which the first token does not wait."""
        if not self._ready:
            self._ready = True
            if self.cache.memory is None:
                self.cache.pack_layers()

    def prepare(self) -> None:
        """Make what the next forward needs, and what has become worth it; called for each step."""
        self.ready()

    def verify(self, rows: Sequence[RowText], trees: Forest) -> tuple[Forest, Verified]:
        """Verify a tree of every row, or nothing where a forward over them is of no use.

        Args:
            rows: all of the call's.

        Returns:
            The trees that were verified, and what the forward showed.
        """
        lengths = self.cache.slots.lengths
        self.cache.require_room(1 + max([lengths[r.index] for r in rows if not r.finished]))
        with self._tapped:
            if not len(trees.token_ids):
                return trees, self._waited(rows, trees)
            if (verified := self._over_drafts(rows, trees)) is not None:
                return trees, verified
            nothing = Forest.empty(len(rows))
            verified = self._waited(rows, nothing)
        # Where the text itself is not finite, no draft is of use.
        self.may_draft = self.may_draft and verified.is_sound
        verified.typical = False
        return nothing, verified

    def _over_drafts(self, rows: Sequence[RowText], trees: Forest) -> Verified | None:
        """A forward over drafts; None, with nothing of it left, where it did not compute the text
        as it would have done without them."""
        try:
            verified = self._waited(rows, trees)
            if verified.is_sound:
                return verified
            self.drop(rows, verified)
            why = "logits behind a draft were not finite (an overflow, or weights that are not)"
        except Exception as error:
            if self.options.several:
                raise
            self.undo()
            # It may take one token of each row only, as plain decoding feeds them.
            self.narrow()
            why = f"a forward over a draft raised {error!r}"
        name = type(self.model).__name__
        logger.warning_once(f"{name}: {why}; the step was repeated without drafts")
        return None

    def _waited(self, rows: Sequence[RowText], trees: Forest) -> Verified:
        """A forward that has ended."""
        widest = self.options.fixed_width or 1 + max(trees.sizes)
        few = widest == 1 or widest * len(trees) <= _FEW_TOKENS
        if few != self._decode_scope.wanted:
            self._decode_scope.want(few)
        self.forwards += 1
        verified = self.forward(rows, trees)
        verified.wait()
        return verified

    def rest(self, rows: Sequence[RowText], tokens: int) -> None:
        """A forward after all rows have ended at so many generated tokens: over some of what the
        cache lacks of them, or over nothing, because other processes still wait in theirs."""
        self._decode_scope.want(False)
        self.prepare()
        with self._tapped:
            if self.lacking(tokens) > 0:
                self.catch_up(rows, tokens)
                return
            nothing = self.forward(rows, Forest.empty(len(rows)))
        self.keep(rows, nothing, [[] for _ in rows])

    def leave(self, tokens: int | None) -> None:
        """End the call, and leave its cache to whoever goes on from it.

        Args:
            tokens: that every row has generated, behind which plain decoding would leave it; None:
                the call was interrupted.
        """
        # What was recorded has taken the experts' own method for granted.
        self._decode_scope.want(False)
        if tokens is None:
            self.abandon()
        else:
            self.end(tokens)
        if self.options.cache_outlives_call:
            self.cache.give_back()

    def narrow(self) -> None:
        """Feed one token of each row from now on, as plain decoding does, and no draft."""
        self.most_fed, self.may_draft = 1, False

    @property
    def processed(self) -> list[int]:
        """Generated tokens of each row that the cache holds."""
        return [length - self.begun for length in self.cache.slots.lengths]

    def limits(
        self,
        rows: Sequence[RowText],
        drafted: Sequence[RowText],
        depths: Sequence[int | None],
    ) -> Limits:
        """What the next forward can verify of drafts.

        Args:
            rows: all of the call's.
            drafted: those that are drafted for, and
            depths: how deep each of their drafts may be of use; None: any.
        """
        total = None
        backlog, nodes = self._backlog(rows)
        if self.reach != UNLIMITED and drafted:
            furthest = max([len(row.generated) for row in drafted])
            room = self.reach.room(self._first_root + furthest - 1)
            if room is not None:
                depths = [room if depth is None else min(depth, room) for depth in depths]
        if self.most_tokens is not None:
            fed = sum([not row.finished for row in rows]) if self.packed else len(rows)
            if self.packed:
                total = self.most_tokens - fed
            else:
                nodes = min(nodes, self.most_tokens // fed - 1)
        nodes = max(0, nodes - backlog)
        return Limits(depths, nodes, total, backlog, self.chains, self.packed)

    def _backlog(self, rows: Sequence[RowText]) -> tuple[int, int]:
        """Pending tokens that a forward carries besides roots and drafts, and how many nodes of
        each row it may feed where it carries none."""
        return 0, self.most_fed - 1

    @cached_property
    def _first_root(self) -> int:
        """The furthest position at which a row's first generated token stands."""
        if self.positions is None:
            # More than there are ids of, where the prompt was embedded by the caller.
            return max(self.prompt_ids.shape[1], self.cache.slots.longest)
        return int(self.next_position.max())

    @property
    def _most_lacking(self) -> int:
        """Tokens per row that one forward catches up on at most."""
        most = min(_MOST_FED, self.most_fed)
        if self.most_tokens is None:
            return most
        return max(1, min(most, self.most_tokens // len(self.prompt_ids)))

    def forward(self, rows: Sequence[RowText], trees: Forest) -> Verified:
        """Feed pending tokens and drafts, one tree per row."""
        raise NotImplementedError

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        """Keep each row's accepted tokens: 0 for the root, 1 + i for node i; none of others."""
        raise NotImplementedError

    def drop(self, rows: Sequence[RowText], verified: Verified) -> None:
        """Keep nothing of a forward, and leave no number of it in the cache."""
        self.keep(rows, verified, [[] for _ in rows])
        self.cache.zero_unused()

    def undo(self) -> None:
        """Leave nothing of a forward that was interrupted."""
        raise NotImplementedError

    def lacking(self, tokens: int) -> int:
        """How many tokens the cache lacks at most of what plain decoding leaves in it after
        generating `tokens` per row: all but the last one."""
        return max(tokens - 1 - done for done in self.processed)

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        """Feed some of what the cache lacks, see `lacking`; finished rows are fed their padding."""
        raise NotImplementedError

    def end(self, tokens: int) -> None:
        """Forget what rows generated beyond this many tokens; make the cache one of plain use."""
        self.cache.require_room(self.begun + tokens - 1)
        self.cache.truncate(self.begun + tokens - 1)
        self.cache.align()

    def abandon(self) -> None:
        """Leave the cache with what all rows have in it, wherever the call was interrupted."""
        self.cache.truncate(min(self.cache.slots.lengths))
        self.cache.align()

    def compute(self, **given: Any) -> Any:
        """The model's forward."""
        with self.scope.computing():
            return self.model(**given)

    def call(self, **given: Any) -> Any:
        """The same, which may be repeated from what was recorded of it."""
        return self.compute(**given)

    @cached_property
    def _token_types(self) -> dict[str, torch.Tensor]:
        """[batch, 1], of fed tokens: they continue the last token's type; in multimodal types they
        are text."""
        types = {}
        if (ids := self.kwargs.get("token_type_ids")) is not None:
            types["token_type_ids"] = ids[:, -1:]
        if (ids := self.kwargs.get("mm_token_type_ids")) is not None:
            types["mm_token_type_ids"] = ids.new_zeros((len(ids), 1))
        return types

    def _run(
        self,
        input_ids: torch.Tensor,
        width: int,
        arguments: dict[str, Any],
        views: Views = NO_VIEWS,
        call: Any = None,
    ) -> Any:
        if self._token_types:
            types = {name: ids.expand(-1, width) for name, ids in self._token_types.items()}
            arguments = types | arguments
        if self._steady is None:
            inputs = self._prepared(input_ids, width, arguments)
        else:
            fed = input_ids if input_ids.shape[1] == width else input_ids[:, -width:]
            inputs = self._steady | {self._ids_name: fed}
        self.feeding = True
        # Compiled code is made once more for arguments in another order.
        given = inputs | arguments | {"return_dict": True}
        try:
            self.cache.slots.views = views
            return (call or self.call)(**{name: given[name] for name in sorted(given)})
        finally:
            self.cache.slots.views = NO_VIEWS

    def _prepared(
        self, input_ids: torch.Tensor, width: int, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """The forward's inputs as the model prepares them.

        What it only passes through is the same at every step, so a model that makes nothing else
        of them than the ids is not asked again.
        """
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=width, **(self.kwargs | arguments)
        )
        # Some models would keep the last token's logits only, whatever is asked of them, or drop
        # their cache by the number of ids, of which packed rows have more than any text.
        inputs.pop("logits_to_keep", None)
        inputs |= {n: v for n, v in self.kwargs.items() if n in CACHE_NAMES}
        rest = {n: v for n, v in inputs.items() if n not in arguments and n != self._ids_name}
        if all(value is self.kwargs.get(name) for name, value in rest.items()):
            self._steady = rest
        return inputs
