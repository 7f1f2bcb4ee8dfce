"""Verification of token trees in static buffers: a step is one launch.

The host fills one small buffer and sends it, the device moves the last step's accepted paths,
builds positions and masks, runs the model, and leaves each node's best token (and its largest
logits, where a drafter learns from them) in a small buffer that is copied back. Widths are buckets,
and keys and values lie in buffers of fixed capacity that the model always sees whole, so that one
recording serves every step of a width; see :mod:`.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...cache.blocks import View
from ...host.feature_taps import FeatureTaps
from ...host.transformers_private import attention_of
from ...system.lazy import cached_property
from ...types.row_text import RowText
from ...types.token_tree import Forest
from ...verification.tree_attention import Int64Array, TreeLayout, TreeTokens
from ...verification.tree_verifier import TreeVerifier
from ...verification.verified import TopLogits, Verified
from .arena import Shape
from .fixed_memory import FixedMemory
from .replay import Shown
from .workspace import Step

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Tokens fed per row; what is wider is fed as it is."""


class NodeChooser(Protocol):
    """Chooses behind all nodes of a forward, on the device, before anybody walks.

    What it runs is queued behind the forward and no part of a recording, which so serves calls of
    all settings.
    """

    def __call__(self, logits: torch.Tensor, trees: Forest, out: torch.Tensor) -> list[int] | None:
        """Given logits [batch, width, vocab_size] and a tree per row, write what the call chooses
        behind each row's root and its nodes, row by row, to int64 [batch * width]. Returns where
        each row begins there; None where it cannot say."""

    def confirms(self, rows: Sequence[RowText], tokens: Sequence[int]) -> bool:
        """Whether what it wrote are the next tokens of rows still, which then are drawn."""


Chosen = tuple[NodeChooser, list[int]]
"""What has chosen behind the nodes of a forward, and where each row begins in what it wrote."""


class FixedVerified(Verified):
    """What a forward left in the buffer that is brought to the host."""

    def __init__(self, shown: Shown, step: Step, typical: bool, chosen: Chosen | None):
        super().__init__(shown.logits, [0] * len(shown.logits), None)
        self.typical, self._chosen = typical, chosen
        self._results, self._largest = step.results, step.largest

    def wait(self) -> None:
        self._results.wait()

    @property
    def is_sound(self) -> bool:
        self.wait()
        return not bool(self._results.host["sound"].isnan())

    def best(self, rows: Sequence[RowText], nodes: Sequence[int]) -> list[int]:
        self.wait()
        best: list[int] = self._results.host["best"][[row.index for row in rows], nodes].tolist()
        return best

    def choose(self, rows: Sequence[RowText], nodes: Sequence[int], select: Any) -> list[int]:
        if self._chosen is not None:
            self.wait()
            chooser, begins = self._chosen
            places = [begins[row.index] + node for row, node in zip(rows, nodes, strict=True)]
            tokens: list[int] = self._results.host["chosen"][places].tolist()
            if chooser.confirms(rows, tokens):
                return tokens
        return super().choose(rows, nodes, select)

    def of_row(self, row: int, nodes: int) -> torch.Tensor:
        # The next forward leaves its own in the same memory.
        return super().of_row(row, nodes).clone()

    @cached_property
    def _brought(self) -> list[NDArray[Any]]:
        """The largest logits and their tokens, which the next forward leaves no trace of."""
        self.wait()
        return [found.copy() for found in self._largest]

    def top(self, row: int, nodes: int) -> TopLogits:
        if not self._largest:
            return super().top(row, nodes)
        first = self.roots[row]
        logits, ids = self._brought
        return TopLogits(logits, np.arange(first, first + 1 + nodes), ids)


class FixedVerifier(TreeVerifier):
    """Verifies one token tree per row; see the module's docstring.

    Attention is computed as the service says: "triton", by the kernels of
    :mod:`.triton_attention`; "mask", by the model's own function under a mask over the whole
    capacity.

    Args:
        choose: finds what is chosen behind every node; None: the walk does.

    Attributes:
        summarises: whether the results of a forward are brought to the host.
    """

    summarises = True
    lends_cache = False

    def __init__(self, *args: Any, choose: NodeChooser | None = None):
        super().__init__(*args)
        options, by = self.options, self.service.attention_by
        self.most_fed = options.fixed_width or self.most_fed
        self._choose = choose
        self.taps = options.taps or FeatureTaps(self.model, [])
        self.widths = WIDTHS if options.fixed_width is None else (options.fixed_width,)
        self._by_kernels = by != "mask"
        if self._by_kernels:
            self.attention_by = by
        self._tells_masks = not self._by_kernels
        # Nodes of a tree lie in other slots than kept ones, and sums over slots round by order.
        self.chains = options.fixed_width is not None
        self._first = self.next_position.cpu().numpy()
        room, layers = self.widths[-1], self.cache.slot_layers
        shape = Shape(
            batch=len(self.prompt_ids),
            capacity=options.capacity + room,
            rules=self.attention.rules,
            dtype=self.attention.dtype,
            device=self.device,
            positions=self._first.shape[:-2],
            top_k=options.top_k,
            taps=self.taps.layers,
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            attention_by=by,
            exact=options.fixed_width is not None,
            fused=options.recorded and options.fused,
            window=max((layer.window or 0 for layer in layers if layer.forgets), default=None),
        )
        self.memory = FixedMemory(
            *(self.model, [self.cache], shape, self.kwargs),
            recorded=options.recorded,
            room=room,
            prompt_mask=self.attention.prompt_mask,
            reserved=self.cache.reserved,
        )
        self.cache.reserved = None
        # The model prepares its inputs once, to see whether it passes them on as they are.
        masks = self.memory.workspace.masks.empty(1)
        arguments = {"attention_mask": masks, "position_ids": self.next_position}
        ids = self.prompt_ids[:, -1:].to(self.device)
        self._prepared(ids, 1, self._token_types | arguments)

    @property
    def cost_variant(self) -> str:
        cost_variant = "recorded" if self.memory.records else "in place"
        return cost_variant if self._choose is None else f"{cost_variant} choosing"

    def _feed(self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]) -> Verified:
        fed = 1 + max(trees.sizes)
        width = self._bucket(fed)
        self.memory.reserve(width)
        step = self.memory.workspace.step(width, width)
        tokens = TreeTokens.of(roots, trees, self.cache.slots.lengths, width=width)
        lines = TreeLayout(tokens.depths, tokens.depths, tokens.sees, np.arange(width))
        self._send(step, tokens.token_ids, lines)
        repeats = self._repeats
        # Where nothing repeats them, all forwards are alike.
        typical = step.used and (step.decided or not repeats)
        shown = self._run_step(step) if repeats else self._compute(step)
        choose, chosen = self._choose, None
        if choose is not None:
            begins = choose(shown.logits, trees, step.results.device["chosen"])
            chosen = None if begins is None else (choose, begins)
        step.results.fetch()
        step.used = True
        return FixedVerified(shown, step, typical, chosen)

    def _send(self, step: Step, token_ids: Int64Array, fed: TreeLayout) -> None:
        """Tell the device of the tokens of all rows, and move what the last step kept."""
        # Catching up, forwards follow one another without a look at their results.
        step.inputs.wait()
        host = step.inputs.host
        kept = np.array(self.cache.slots.lengths)[:, None]
        host["token_ids"].numpy()[:] = token_ids
        host["slots"].numpy()[:] = kept + fed.offsets
        progress = np.asarray(self.processed)[:, None]
        host["positions"].numpy()[:] = self._first + progress + fed.depths
        workspace = self.memory.workspace
        workspace.masks.write(host, fed, kept, workspace.arena.first)
        moved = self.memory.moves.shape[2]
        host["moves"].numpy()[:, :, :moved] = self.memory.moves
        step.inputs.send()
        self.memory.move(step.inputs.device["moves"][:, :, :moved])

    def _run_step(self, step: Step) -> Shown:
        shown = self.memory.run(step, lambda: self._compute(step))
        self.feeding = True
        self.taps.show(shown.features)
        return shown

    @property
    def _repeats(self) -> bool:
        """Whether forwards are recorded, and read nothing that belongs to this call only."""
        if self._steady is None or not self.memory.records:
            return False
        others = (*self._steady.values(), *self._token_types.values())
        return not any(isinstance(value, torch.Tensor) for value in others)

    def _compute(self, step: Step) -> Shown:
        inputs, workspace = step.inputs.device, self.memory.workspace
        masks, begin = workspace.masks, inputs.get("begin")
        near = inputs["slots"] if begin is None else inputs["slots"] - begin
        views = [View(places=(workspace.rows, slots)) for slots in (inputs["slots"], near)]
        width = inputs["token_ids"].shape[1]
        told = masks.build(inputs) if self._tells_masks else masks.empty(width)
        scope: Any = nullcontext()
        if self._by_kernels:
            from .triton_attention import TritonAttention  # needs Triton

            name = attention_of(self.model.config)
            scope = self._attending(TritonAttention(masks.seen(inputs, told), name))
        arguments = {"position_ids": inputs["positions"], "attention_mask": told}
        with scope:
            outputs = self._run(inputs["token_ids"], width, arguments, (views[0], views[1]))
        if self.summarises:
            step.summarise(outputs.logits)
        return Shown(outputs.logits, self.taps.shown())

    def end(self, tokens: int) -> None:
        self.memory.detach()
        self.repeated, self.recordings = self.memory.repeated, self.memory.recordings
        super().end(tokens)
        if self.options.cache_outlives_call:
            self._detach()
        self.memory.give_back()

    def abandon(self) -> None:
        self.memory.detach()
        super().abandon()
        self._detach()

    def _detach(self) -> None:
        for layer in self.cache.slot_layers:
            layer.detach()
