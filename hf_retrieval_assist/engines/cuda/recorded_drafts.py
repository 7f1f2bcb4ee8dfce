"""A draft model's forwards on an accelerator, in static buffers, recorded as the target's are.

One recording serves every forward of a width, whether it feeds what is new in the texts or a level
of their trees: its masks have a column for every token that a draft may feed behind a text. Levels
follow one another without a look at their results, whose tokens never leave the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...draft_models.rows import DraftCache
from ...host.transformers_private import with_cache
from ...verification.options import CallOptions
from ...verification.tiers import Service
from ...verification.tree_attention import TreeLayout
from ...verification.verifier import ForwardScope
from .fixed_verifier import FixedVerifier


class RecordedDrafts(FixedVerifier):
    """Forwards of a draft model behind the texts in its cache, which has seen some of each.

    Args:
        model: a transformers model.
        cache: of texts that begin at position 0.
        service: how the model is fed trees.
        most: tokens of each row that are fed before some are kept at most.
        recorded: whether forwards may be repeated from a recording. Those of compiled models are
            not: under what looks for waits, torch would run them as if they were not.
    """

    summarises = False

    def __init__(
        self, model: Any, cache: DraftCache, service: Service, most: int, recorded: bool
    ) -> None:
        before_first = torch.full((len(cache.slots.lengths), 1), -1)
        kwargs = with_cache(model, cache) | {"use_cache": True, "position_ids": before_first}
        options = CallOptions(recorded=recorded)
        super().__init__(model, cache, kwargs, before_first, service, options, ForwardScope())
        # A level is fed whole: wrong drafts cost time and no token.
        self.most_fed = self.widths[-1]
        self.most, self.begun = most, 0
        # What fills a line up lies behind.
        self._columns = most + self._bucket(most)

    def feed(self, token_ids: torch.Tensor, fed: TreeLayout) -> torch.Tensor:
        """Logits [rows, w, vocab_size], valid until the next forward.

        Args:
            token_ids: int64 [rows, w], on the host, or where only the device knows them.
            fed: of them, on the host.
        """
        (rows, width), known = token_ids.shape, fed.columns.shape[1]
        if known == width:
            # The memory of a tree that has begun cannot be exchanged.
            self.memory.reserve(self._columns)
        step = self.memory.workspace.step(self._bucket(width), self._columns)
        # Lines are filled up to a bucket, behind all that lies there.
        spare = self._bucket(width) - width
        filler, line = np.arange(known, known + spare)[None], ((0, 0), (0, spare))
        lines = TreeLayout(
            depths=np.pad(fed.depths, line),
            columns=np.pad(fed.columns, line),
            sees=np.pad(fed.sees.expand(rows, -1, -1), (*line, (0, spare))),
            offsets=np.concatenate([fed.offsets, filler.repeat(len(fed.offsets), 0)], axis=1),
        )
        told = token_ids.device.type == "cpu"
        self._send(step, np.pad(token_ids, line) if told else np.zeros(1, np.int64), lines)
        if not told:
            step.inputs.device["token_ids"][:, :width].copy_(token_ids)
        return self._run_step(step).logits[:, :width]
