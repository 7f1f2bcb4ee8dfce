"""Verification of token trees in memory that stays where it is: a step is one launch.

The host fills one small buffer and sends it, the device moves the last step's accepted paths,
builds positions and masks, runs the model, and leaves each node's best token (and its largest
logits, where a drafter learns from them) in a small buffer that is copied back. Widths are buckets,
and keys and values lie in buffers of fixed capacity that the model always sees whole, so that one
recording serves every step of a width; see :mod:`.replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..host.compiled import Compiled
from ..host.feature_taps import FeatureTaps
from ..host.transformers_private import attention_of
from ..kernels.fixed_attention import AttentionBy
from ..row_text import RowText
from ..token_tree import Forest, TokenTree
from .fed_tokens import FedTokens
from .fixed_memory import FixedMemory
from .kv_cache import moved_from
from .packed_buffer import PackedBuffer
from .replay import Shown
from .top_logits import FoundTop, TopLogits
from .tree_attention import Int64Array, LayerMask
from .verified import Verified
from .verifiers import TreeVerifier
from .workspace import MOST_MOVED, Shape, Step

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Tokens fed per row; what is wider is fed as it is."""

COMPILED_WIDTHS = (1, 4, 16, 64)
"""The same where every width may be compiled, which takes its time."""


Choose = Callable[[torch.Tensor, Sequence[TokenTree], torch.Tensor], list[int] | None]
"""Given logits [batch, width, vocab_size] and a tree per row, writes to int64 [batch * width] what
the call chooses behind each row's root and its nodes, row by row, all on the device. Returns where
each row begins there; None where it cannot say."""


@dataclass(frozen=True)
class ForwardOptions:
    """What a call wants of its forwards.

    Attributes:
        taps: the hidden states that drafters learn from; entered round every forward.
        top_k: how many of every node's largest logits they learn from.
        capacity: slots that the call will need, as far as that is known.
        keeps_cache: whether the cache outlives the call.
        most_tokens: see :class:`~.verifiers.Verifier`.
        recorded: whether forwards may be repeated from a recording.
        compiled: what is called in the model's place; None: the model.
        choose: finds what is chosen behind every node; None: the walk does. What it runs is queued
            behind the forward and no part of a recording, which so serves calls of all settings.
        fixed_width: tokens per row that every forward feeds, of chains; None: as many as there are,
            filled up to the next width, of trees.
    """

    taps: FeatureTaps | None = None
    top_k: int = 0
    capacity: int = 0
    keeps_cache: bool = True
    most_tokens: int | None = None
    recorded: bool = False
    compiled: Compiled | None = None
    choose: Choose | None = None
    fixed_width: int | None = None


class FixedVerified(Verified):
    """What a forward left in the buffer that is brought to the host."""

    def __init__(
        self, shown: Shown, results: PackedBuffer, typical: bool, chosen: list[int] | None
    ):
        super().__init__(shown.logits, [0] * len(shown.logits), shown.outputs)
        self.typical = typical
        self._results = results
        # Where each row begins in what was chosen.
        self._chosen = chosen

    def wait(self) -> None:
        self._results.wait()

    def best(self, rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
        self.wait()
        best: list[int] = self._results.host["best"][rows, nodes].tolist()
        return best

    def chosen(self, rows: Sequence[int], nodes: Sequence[int]) -> list[int] | None:
        if self._chosen is None:
            return None
        self.wait()
        places = [self._chosen[row] + node for row, node in zip(rows, nodes, strict=True)]
        chosen: list[int] = self._results.host["chosen"][places].tolist()
        return chosen

    def top(self, row: int, nodes: int) -> TopLogits:
        if "top_ids" not in self._results.host:
            return super().top(row, nodes)
        self.wait()
        ids, logits = (
            self._results.host[name].numpy()[row, : 1 + nodes] for name in ("top_ids", "top_logits")
        )
        return FoundTop(ids, logits)


class FixedVerifier(TreeVerifier):
    """Verifies one token tree per row; see the module's docstring.

    Args:
        options: what the call wants.
        by: what computes attention; see :mod:`~hf_retrieval_assist.kernels.fixed_attention`.
    """

    def __init__(
        self, *args: Any, options: ForwardOptions, by: AttentionBy = "mask", **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.options = options
        self.taps = options.taps or FeatureTaps(self.model, [])
        compiled = options.compiled
        self.widths = WIDTHS if compiled is None or compiled.widens else COMPILED_WIDTHS
        if options.fixed_width is not None:
            self.widths = (options.fixed_width,)
        self._first = self.next_position.cpu().numpy()
        self._moves: tuple[Int64Array, Int64Array] | None = None
        rules, room = self.attention.rules, self.widths[-1]
        shape = Shape(
            batch=len(self.prompt_ids),
            capacity=options.capacity + room,
            rules=rules if isinstance(rules, LayerMask) else tuple(rules.items()),
            dtype=self.attention.dtype,
            device=self.device,
            positions=self._first.shape[:-2],
            top_k=options.top_k,
            taps=self.taps.boundaries,
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            compiled=compiled is not None,
            attention_by=by,
            exact=options.fixed_width is not None,
        )
        self.memory = FixedMemory(
            *(self.model, self.cache.slot_layers, shape, self.kwargs),
            recorded=options.recorded and (compiled is None or compiled.recordable is not None),
            slots=self.cache.slots.longest + room,
            prompt_mask=self.attention.prompt_mask,
        )

    @property
    def manner(self) -> str:  # type: ignore[override]
        recorded = self.memory.records
        if self.options.compiled is not None:
            manner = "compiled recorded" if recorded else "compiled"
        else:
            manner = "recorded" if recorded else "in place"
        return manner if self.options.choose is None else f"{manner} choosing"

    def limit(self, trees: Sequence[TokenTree], rows: Sequence[RowText]) -> Sequence[TokenTree]:
        limited = super().limit(trees, rows)
        if self.options.fixed_width is not None:
            # Nodes of a tree lie in other slots than kept ones, and sums over slots round by order.
            limited = [tree.best_chain() for tree in limited]
        elif self.options.compiled is None:
            return limited
        return Forest.of(limited).prune([self.widths[-1] - 1] * len(limited))

    def _feed(
        self, roots: Sequence[int], trees: Sequence[TokenTree], rows: Sequence[RowText]
    ) -> Verified:
        fed = 1 + max(map(len, trees))
        width = self._bucket(fed)
        self._reserve(self.cache.slots.longest + width)
        step = self.memory.workspace.step(width, width)
        typical = step.used and step.replay.settled
        self._send(step, FedTokens.of(roots, trees, self.cache.slots.lengths, width=width))
        shown = self._show(step)
        choose, chosen = self.options.choose, None
        if choose is not None:
            chosen = choose(shown.logits, trees, step.results.device["chosen"])
        step.results.fetch()
        step.used = True
        return FixedVerified(shown, step.results, typical, chosen)

    def _bucket(self, width: int) -> int:
        return next((bucket for bucket in self.widths if bucket >= width), width)

    def _reserve(self, slots: int) -> None:
        if self.memory.lacks(slots):
            self._settle()
            self.memory.grow(slots + slots // 4 + self.widths[-1])

    def _send(self, step: Step, fed: FedTokens) -> None:
        """Tell the device of the tokens, and move what the last step kept."""
        # Catching up, forwards follow one another without a look at their results.
        step.inputs.wait()
        host = step.inputs.host
        host["token_ids"].numpy()[:] = fed.token_ids
        host["slots"].numpy()[:] = fed.slots
        progress = np.asarray(self.processed)[:, None]
        host["positions"].numpy()[:] = self._first + progress + fed.depths
        self.memory.workspace.masks.write(host, fed)
        moved = 0
        if self._moves is not None:
            moved = self._moves[0].shape[1]
            host["moves"].numpy()[:, :, :moved] = self._moves
        step.inputs.send()
        if moved:
            source, destination = step.inputs.device["moves"][:, :, :moved]
            self.memory.workspace.arena.move(self.memory.workspace.rows, source, destination)
            self._moves = None

    def _show(self, step: Step) -> Shown:
        if not self._repeatable(step):
            return self._compute(step)
        shown = self.memory.show(step, lambda: self._compute(step))
        self.feeding = True
        self.taps.show(shown.features)
        return shown

    def _repeatable(self, step: Step) -> bool:
        """Whether the forward reads nothing that belongs to this call only.

        That is known when the model has prepared its inputs once.
        """
        if self._steady is None:
            return False
        others = (*self._steady.values(), *self._token_types(1).values())
        return not any(isinstance(value, torch.Tensor) for value in others)

    def _compute(self, step: Step) -> Shown:
        inputs = step.inputs.device
        self.cache.slots.places = self.memory.workspace.rows, inputs["slots"]
        if (compiled := self.options.compiled) is not None:
            self.call = compiled.recordable if self.memory.records else compiled.call
        width = inputs["token_ids"].shape[1]
        triton = self.memory.attention_by == "triton"
        masks = self.memory.workspace.masks.build(inputs, empty=triton)
        arguments = {"attention_mask": masks, "position_ids": inputs["positions"]}
        with self._attention(inputs, masks):
            outputs = self._run(inputs["token_ids"], width, arguments)
        step.summarise(outputs.logits)
        return Shown(outputs.logits, self.taps.shown(), outputs)

    def _attention(self, inputs: dict[str, torch.Tensor], masks: Any) -> Any:
        """Scope of the attention that a forward runs with."""
        if self.memory.attention_by == "mask":
            return nullcontext()
        from ..kernels.triton_attention import TritonAttention  # needs Triton

        seen = self.memory.workspace.masks.seen(inputs, masks)
        return self._attending(TritonAttention(seen, attention_of(self.model.config)))

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        self._keep(accepted)
        self.feeding = False

    def _keep(self, accepted: Sequence[Sequence[int]]) -> None:
        lengths = self.cache.slots.lengths
        if sources := moved_from(accepted):
            self._move()
            base = np.asarray(lengths, np.int64)[:, None]
            self._moves = base + np.asarray(sources), base + np.arange(len(sources[0]))
            if len(sources[0]) > MOST_MOVED:
                self._move()
        self.cache.slots.set_lengths(
            [length + len(path) for length, path in zip(lengths, accepted, strict=True)]
        )

    def _move(self) -> None:
        """Move accepted paths now instead of with the next step."""
        if self._moves is not None:
            source, destination = torch.from_numpy(np.stack(self._moves)).to(self.device)
            self.memory.workspace.arena.move(self.memory.workspace.rows, source, destination)
            self._moves = None

    def _settle(self) -> None:
        """Make the layers show what is kept, as other caches do."""
        self._move()
        self.cache.slots.places = None
        for layer in self.cache.slot_layers:
            layer.show(self.cache.slots.longest)

    def finish(self, tokens: int) -> None:
        self._settle()
        super().finish(tokens)
        if self.options.keeps_cache:
            self._move_out()
        self.memory.give_back()

    def abandon(self) -> None:
        self._settle()
        super().abandon()
        self._move_out()

    def _move_out(self) -> None:
        for layer in self.cache.slot_layers:
            layer.move_out()
