"""How one forward checks drafts and how the cache forgets what was rejected.

A verifier feeds every row its pending tokens (the ones the model has not processed, the root being
the last of them) followed by a draft, and later keeps what was accepted. :class:`TreeVerifier`
feeds token trees under a 4D mask, and rows advance independently; see :mod:`.chain_verifier` for
models that take chains alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..cache.blocks import Views
from ..cache.kv_cache import SlotCache
from ..cache.slot_layers import NO_VIEWS
from ..host.scopes import Attention, attending
from ..host.transformers_private import CACHE_NAMES, attention_of, forward_parameters, input_device
from ..system.lazy import cached_property
from ..types.row_text import RowText
from ..types.token_tree import Forest, Limits, TokenTree
from .options import Bounds
from .reach import UNLIMITED
from .tree_attention import TreeAttention, TreeLayout, TreeTokens
from .verified import Verified

# Tokens per row that one forward catches up on at most, since each of them gets logits.
_MOST_FED = 64

_NO_SCOPE: AbstractContextManager[Any] = nullcontext()


class ModelForward:
    """A model's forward, in the scope in which its engine computes it."""

    def __init__(self, model: Any, scope: AbstractContextManager[Any]) -> None:
        self.model, self.scope = model, scope

    def __call__(self, **given: Any) -> Any:
        with self.scope:
            return self.model(**given)


class Verifier:
    """Common part: the keyword arguments of a forward and the rows' progress.

    Args:
        model: a transformers model.
        cache: its self-attention cache, filled by the prefill.
        model_kwargs: `generate`'s, after the prefill.
        prompt_ids: int64 [batch, length], as the rows of text begin.
        bounds: what a forward may feed.
        scope: in which the model computes.

    Attributes:
        begun: slots per row that held the prompt.
        widths: the numbers of tokens per row that forwards are filled up to; what is wider, or any
            number where there are none, is fed as it is.
        feeding: whether a forward has begun whose tokens are neither kept nor dropped yet.
        packed: whether a forward costs what all rows feed together, so that rows which have ended
            cost nothing; otherwise it is as wide as the widest row.
        most_fed, most_tokens, reach: see :class:`~.options.Bounds`.
        chains: whether drafts have to be single paths.
        compute: the model's forward; `call` may repeat what was recorded of it instead.
        attention_by: what computes attention.
        cost_variant: how forwards run; the cost of a width is its own.
        repeated, recordings: forwards that were repeated from a recording, and recordings that were
            made.
    """

    packed = False
    chains = False
    cost_variant = ""
    repeated = recordings = 0

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
        bounds: Bounds = Bounds(),  # noqa: B008, a tuple
        scope: AbstractContextManager[Any] = _NO_SCOPE,
    ):
        self.model = model
        self.most_fed, self.most_tokens, self.reach = bounds
        self.compute = ModelForward(model, scope)
        self.call: Any = self.compute
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

    def prepare(self) -> None:
        """Make what forwards behind the prompt's need, for which the first token does not wait;
        called before each of them."""
        if not self._ready:
            self._ready = True
            if self.cache.memory is None:
                self.cache.pack_layers()

    def narrow(self) -> None:
        """Feed one token of each row from now on, as plain decoding does."""
        self.most_fed = 1

    @property
    def processed(self) -> list[int]:
        """Generated tokens of each row that the cache holds."""
        return [length - self.begun for length in self.cache.slots.lengths]

    def limits(
        self,
        rows: Sequence[RowText],
        drafted: Sequence[RowText],
        depths: Sequence[int | None],
        lockstep: bool = False,
    ) -> Limits:
        """What the next forward can verify of drafts.

        Args:
            rows: all of the call's.
            drafted: those that are drafted for, and
            depths: how deep each of their drafts may be of use; None: any.
            lockstep: see `Limits`.
        """
        total, packed = None, self.packed and not lockstep
        backlog, nodes = self._backlog(rows)
        if self.reach != UNLIMITED and drafted:
            # Wherever rows in lockstep have got to.
            room = self.reach.room(self._first_root + len(drafted[0].generated) - 1)
            if room is not None:
                depths = [room if depth is None else min(depth, room) for depth in depths]
        if self.most_tokens is not None:
            fed = sum([not row.finished for row in rows]) if self.packed else len(rows)
            if packed:
                total = self.most_tokens - fed
            else:
                nodes = min(nodes, self.most_tokens // fed - 1)
        nodes = max(0, nodes - backlog)
        return Limits(depths, nodes, total, backlog, lockstep or self.chains, packed, lockstep)

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
        self.prepare()
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


class TreeVerifier(Verifier):
    """Verifies one token tree per row; see the module's docstring.

    A forward over padded rows costs their number times the widest tree.

    Args:
        attention: builds the masks.

    Attributes:
        lends_cache: whether a drafter that runs the model itself may write behind the texts.
    """

    lends_cache = True

    def __init__(self, *args: Any, attention: TreeAttention, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.attention = attention
        self._unsound = False  # whether drafts since the last `clear_draft` had NaN for logits

    def _bucket(self, width: int) -> int:
        fitting = (bucket for bucket in self.widths if width <= bucket <= self.most_fed)
        return next(fitting, width)

    @cached_property
    def _modules(self) -> frozenset[nn.Module]:
        """Whose attention belongs to these forwards; hooks may call other models."""
        return frozenset(self.model.modules())

    def _attending(self, attend: Attention) -> attending:
        """Scope of a forward whose attention is computed otherwise."""
        return attending(attention_of(self.model.config), self._modules, attend)

    def forward(self, rows: Sequence[RowText], trees: Forest) -> Verified:
        return self._feed(
            [row.last for row in rows], trees, [row for row in rows if not row.finished]
        )

    def _feed(self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]) -> Verified:
        """Feed roots and trees, one of each per row of the batch, for the sake of some rows."""
        width = self._bucket(1 + max(trees.sizes))
        return self._feed_lines(TreeTokens.of(roots, trees, self.cache.slots.lengths, None, width))

    def _feed_lines(self, fed: TreeTokens, call: Any = None) -> Verified:
        """Feed rows side by side, each filled up to the widest."""
        ids, lines = fed.lines(self.device)
        batch, width = fed.token_ids.shape
        outputs = self._run(ids, width, *self._tree_arguments(lines), call)
        return Verified(outputs.logits, [0] * batch, outputs)

    @cached_property
    def _next(self) -> int | None:
        """The position behind every row's prompt; None where rows have several."""
        found = self.next_position
        alike = found.ndim == 2 and bool((found == found[0]).all())
        return int(found[0, 0]) if alike else None

    def _tree_arguments(self, fed: TreeLayout) -> tuple[dict[str, Any], Views]:
        """Masks and positions of each line, and where layers are written to."""
        slots, positions = self.cache.slots, self.next_position
        masks, views = self.attention.masks(fed, slots)
        # Each row's root's: [batch, 1], or with a leading axis where ids have one.
        if self._next is not None and slots.is_even and fed.depths.shape[0] == positions.shape[0]:
            begin = self._next + slots.longest - self.begun
            if fed.depths.is_cpu:
                ids = torch.from_numpy(fed.depths.numpy() + begin)
            else:
                ids = fed.depths + begin
            return {"attention_mask": masks, "position_ids": ids}, views
        if fed.rows is None and slots.is_even:
            positions = positions + (slots.longest - self.begun)
        else:
            positions = positions + (slots.index(self.device)[1] - self.begun)
        if fed.rows is not None:
            positions = positions[..., fed.rows, :]
        return {"attention_mask": masks, "position_ids": positions + fed.depths}, views

    @cached_property
    def _one(self) -> TreeLayout:
        """A token of each row, behind what it has kept."""
        nothing = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        seen = nothing.new_ones((len(self.prompt_ids), 1, 1), dtype=torch.bool)
        return TreeLayout(nothing, nothing, seen)

    def draft(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1, vocab_size] of a token of each row, [batch, 1], that is not kept."""
        arguments, views = self._tree_arguments(self._one)
        call = self.call if self.cache.slots.is_even else self.compute
        outputs = self._run(token_ids, 1, arguments, views, call)
        logits: torch.Tensor = outputs.logits
        self._unsound = self._unsound or bool(logits[..., 0].isnan().any())
        return logits

    def feed_again(self, texts: Sequence[Sequence[int]]) -> None:
        """Feed texts, as many tokens of each row, which are not kept, to whoever sees the model's
        layers."""
        trees = Forest.of([TokenTree.chain(ids[1:], [1.0] * len(ids[1:])) for ids in texts])
        roots = [ids[0] for ids in texts]
        fed = TreeTokens.of(roots, trees, self.cache.slots.lengths, None, len(texts[0]))
        self._unsound = True  # unless somebody looked at the logits
        self._feed_lines(fed, self.compute)

    def clear_draft(self) -> None:
        """Drop what `draft` or `feed_again` has fed."""
        self.cache.truncate(self.cache.slots.longest)
        self.feeding = False
        if self._unsound:
            self.cache.zero_unused()
            self._unsound = False

    def undo(self) -> None:
        self._unsound = True
        self.clear_draft()

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        self.cache.keep(accepted)
        self.feeding = False

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        stops = [min(tokens - 1, done + self._most_lacking) for done in self.processed]
        fed = [row.fed(*span) for row, *span in zip(rows, self.processed, stops, strict=True)]
        roots = [ids[0] if ids else row.last for row, ids in zip(rows, fed, strict=True)]
        trees = Forest.of([TokenTree.chain(ids[1:], [1.0] * len(ids[1:])) for ids in fed])
        lacking = [row for row, ids in zip(rows, fed, strict=True) if ids]
        self.keep(rows, self._feed(roots, trees, lacking), [range(len(ids)) for ids in fed])
