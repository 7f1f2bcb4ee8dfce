"""Tokens chosen from logits that are approximations; a screen tells exactly those that matter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process

from ...decoding.selection import BLIND, TOUCHING, TokenSelector
from ...types.row_text import RowText
from ...verification.largest import largest
from ...verification.verified import TopLogits, Verified
from .screen import NO_TOKENS, Screened


def shortlist_of(select: TokenSelector) -> int:
    """How many of a row's greatest logits its token is chosen from, where only they and those that
    are touched matter; 0 where all do, or processors are not known.

    What follows on a top-k warper sees nothing else. So does whoever takes the greatest.
    """
    kinds = select.kinds
    count = 0 if select.do_sample else 1
    for processor, kind in zip(select.processors, kinds, strict=True):
        if count and kind in BLIND and select.do_sample:
            continue  # top-k excludes it
        if kind is logits_process.TopKLogitsWarper:
            count = processor.top_k
        elif kind is not logits_process.TemperatureLogitsWarper and kind not in TOUCHING:
            return 0
    return count


def _touched(select: TokenSelector, row: RowText, vocab_size: int) -> torch.Tensor:
    """int64 [n], different: the tokens whose logits processors may change."""
    found = [TOUCHING[type(one)](one, row) for one in select.processors if type(one) in TOUCHING]
    ids = torch.cat([NO_TOKENS, *found]).unique()
    return ids[(ids >= 0) & (ids < vocab_size)]


class ScreenedVerified(Verified):
    """A forward whose logits are approximations.

    Args:
        verified: the forward.
        screened: tells its logits exactly.
    """

    def __init__(self, verified: Verified, screened: Screened):
        self.__dict__.update(verified.__dict__)
        self._screened = screened

    @property
    def is_sound(self) -> bool:
        return not self._screened.scores.starts_with_nan()

    def best(self, rows: Sequence[RowText], nodes: Sequence[int]) -> list[int]:
        return [self._screened.argmax(place) for place in self.places(rows, nodes)]

    def top(self, row: int, nodes: int) -> TopLogits:
        first = self.roots[row]
        return TopLogits(self._screened.scores, np.arange(first, first + 1 + nodes))

    def choose(
        self, rows: Sequence[RowText], nodes: Sequence[int], select: TokenSelector
    ) -> list[int]:
        if select.greedy:
            return self.best(rows, nodes)
        places = self.places(rows, nodes)
        if select.do_sample:
            greatest = partial(self._greatest, places)
            tokens = select.draw_of_few(rows, self._screened.near.shape[1], greatest)
            if tokens is not None:
                return tokens
        return select.pick(rows, select.process(rows, self._decisive(rows, places, select)))

    def _greatest(self, places: Sequence[int], count: int) -> list[tuple[Any, Any]]:
        """See :meth:`~...decoding.selection.TokenSelector.draw_of_few`."""
        found = []
        for place in places:
            ids, logits = self._screened.logits(place, count=count)
            best, order = largest(logits.float(), count)
            found.append((ids[order].int().numpy(), best.numpy()))
        return found

    def _decisive(
        self, rows: Sequence[RowText], places: Sequence[int], select: TokenSelector
    ) -> torch.Tensor:
        """float32 [rows, vocab_size]: the logits that their tokens are chosen from, others −inf."""
        near, count = self._screened.near, shortlist_of(select)
        raw = near.new_full((len(places), near.shape[1]), -torch.inf)
        for line, row, place in zip(raw, rows, places, strict=True):
            touched = _touched(select, row, len(line))
            ids, logits = self._screened.logits(place, touched, count)
            line[ids] = logits.float()
        return raw
