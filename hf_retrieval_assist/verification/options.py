"""What a call wants of its forwards, told to whatever runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..host.feature_taps import FeatureTaps
from ..types.token_tree import TokenTree
from .reach import UNLIMITED, Reach

Choose = Callable[[torch.Tensor, Sequence[TokenTree], torch.Tensor], list[int] | None]
"""Given logits [batch, width, vocab_size] and a tree per row, writes to int64 [batch * width] what
the call chooses behind each row's root and its nodes, row by row, all on the device. Returns where
each row begins there; None where it cannot say."""


class Bounds(NamedTuple):
    """What a forward may feed.

    Attributes:
        most_fed: tokens per row.
        most_tokens: tokens of all rows, filler included, where it is to round as plain decoding
            does; None: any number.
        reach: how far it may reach.
    """

    most_fed: int = 1 << 30
    most_tokens: int | None = None
    reach: Reach = UNLIMITED


@dataclass(frozen=True)
class Demand:
    """What calls want of a model's forwards, beside their inputs.

    Attributes:
        width: tokens per row that they may feed.
        states: whether they return hidden states or attentions.
        stays: whether they are worth memory that stays in place, where there is such, under masks
            over all of it: they are recorded, or of one width.
    """

    width: int = 65
    states: bool = False
    stays: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a call wants of an engine from its prefill on.

    Attributes:
        reroute, extra_memory: the assistant's options.
        several: whether the model is spread over processes, which have to compute the same bits.
        batch: rows.
        screens: whether the call needs of its logits no more than which token they choose.
        draws: whether tokens are drawn from all others.
    """

    reroute: bool = True
    extra_memory: int | None = None
    several: bool = False
    batch: int = 1
    screens: bool = False
    draws: bool = False


@dataclass(frozen=True)
class ForwardOptions:
    """What a call wants of its forwards behind the prefill.

    Attributes:
        taps: the hidden states that drafters learn from; entered round every forward.
        top_k: how many of every node's largest logits they learn from.
        capacity: slots that the call will need, as far as that is known.
        keeps_cache: whether the cache outlives the call.
        most_tokens: see :class:`Bounds`.
        recorded: whether forwards may be repeated from a recording.
        fused: whether a recording on a GPU runs small kernels as one.
        by_kernels: whether an engine's own kernels compute them.
        states: whether hidden states or attentions of every forward are looked at.
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
    fused: bool = False
    by_kernels: bool = False
    states: bool = False
    choose: Choose | None = None
    fixed_width: int | None = None
