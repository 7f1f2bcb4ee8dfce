"""A draft model's forwards on an accelerator, in memory that stays, recorded as the target's are.

One recording serves every forward of a width, whether it feeds what is new in the texts or a level
of their trees: its masks have a column for every token that a draft may feed behind a text. Levels
follow one another without a look at their results, whose tokens never leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..host.transformers_private import is_compiled, with_cache
from ..verification.fed_tokens import FedTokens
from ..verification.fixed_verifier import FixedVerifier, ForwardOptions
from ..verification.kv_cache import SlotCache
from ..verification.tree_attention import BoolArray, Int64Array, LayerMask, TreeAttention


class RecordedDrafts(FixedVerifier):
    """Forwards of a draft model behind the texts in its cache, which has seen some of each.

    Args:
        model: a transformers model.
        cache: of texts that begin at position 0.
        rules: how far back each kind of layer sees.
        most: tokens of each row that are fed between two calls of `keep_fed` at most.
        recorded: whether forwards may be repeated from a recording. Those of compiled models are
            not: under what looks for waits, torch would run them as if they were not.
    """

    summarises = False

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        rules: dict[str, LayerMask] | LayerMask,
        most: int,
        recorded: bool,
    ) -> None:
        before_first = torch.full((len(cache.slots.lengths), 1), -1)
        kwargs = with_cache(model, cache) | {"use_cache": True, "position_ids": before_first}
        super().__init__(
            *(model, cache, kwargs, before_first),
            attention=TreeAttention(rules, None, model.dtype),
            options=ForwardOptions(recorded=recorded and not is_compiled(model)),
        )
        self.most, self.begun = most, 0
        # What fills a line up lies behind.
        self._columns = most + self._bucket(most)
        self._forget()

    def _forget(self) -> None:
        self._depths: Int64Array = np.empty((len(self.prompt_ids), 0), np.int64)

    def feed(
        self,
        token_ids: Int64Array | torch.Tensor,
        depths: Int64Array,
        sees: BoolArray | torch.Tensor,
    ) -> torch.Tensor:
        """Logits [rows, w, vocab_size] of tokens fed behind those since the last `keep_fed`, valid
        until the next forward.

        Args:
            token_ids: int64 [rows, w].
            depths: int64 [rows, w], counted from the end of each cached text.
            sees: bool [rows, w, fed + w], which of the tokens behind the text each one sees. Like
                `token_ids` it is on the device where only that knows it.
        """
        width, earlier = depths.shape[1], self._depths
        if not earlier.shape[1]:
            # The memory of a tree that has begun cannot be exchanged.
            self._reserve(self.cache.slots.longest + self._columns)
        step = self.memory.workspace.step(self._bucket(width), self._columns)
        self._send(step, self._filled(token_ids, depths, sees))
        if isinstance(token_ids, torch.Tensor):
            step.inputs.device["token_ids"][:, :width].copy_(token_ids)
        if isinstance(sees, torch.Tensor):
            self.memory.workspace.masks.narrow(step.inputs.device, sees)
        self._depths = np.concatenate([earlier, depths], axis=1)
        return self._show(step).logits[:, :width]

    def _filled(
        self,
        token_ids: Int64Array | torch.Tensor,
        depths: Int64Array,
        sees: BoolArray | torch.Tensor,
    ) -> FedTokens:
        """Lines filled up to a bucket; what only the device knows is 0, or True, for now."""
        (rows, width), before = depths.shape, self._depths.shape[1]
        full = self._bucket(width)
        ids, places = np.zeros((2, rows, full), np.int64)
        places[:, :width] = depths
        if not isinstance(token_ids, torch.Tensor):
            ids[:, :width] = token_ids
        seen = np.zeros((rows, full, before + full), np.bool_)
        seen[:, :width, : before + width] = True if isinstance(sees, torch.Tensor) else sees
        lengths = np.array(self.cache.slots.lengths, np.int64)
        fed = np.full(rows, width, np.int64)
        return FedTokens(np.arange(rows), fed, lengths, ids, places, seen, self._depths)

    def keep_fed(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget what was fed since the last time, except the given tokens of each row."""
        self._keep(paths)
        self._forget()

    def show(self) -> None:
        """Make the layers of the cache show what is kept."""
        self._settle()

    @torch.no_grad()  # as it was recorded
    def release(self) -> None:
        """Give the memory back, for the model's next drafts."""
        self._settle()
        self.memory.give_back()
