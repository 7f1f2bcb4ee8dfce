"""What a call wants of its forwards, told to whatever runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..host.feature_taps import FeatureTaps
from .reach import UNLIMITED, Reach


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
class ServiceDemand:
    """What calls want of a model's forwards, beside their inputs.

    Attributes:
        width: tokens per row that they may feed.
        static_buffers: whether they are worth these, where there are such, under masks over all of
            them: they are recorded, or of one width.
        trusts: whether the model's owner says that its forward computes each token from the tokens
            before it, whatever the length and the number fed, where others than known libraries
            have written parts of it.
    """

    width: int = 65
    static_buffers: bool = False
    trusts: bool = False


@dataclass(frozen=True)
class CallOptions:
    """What a call wants of an engine from its prefill on.

    Attributes:
        reroute, extra_memory: the assistant's options.
        several: whether the model is spread over processes, which have to compute the same bits.
        batch: rows.
        select: what chooses the tokens of rows on their own; None: more is done with logits.
    """

    reroute: bool = True
    extra_memory: int | None = None
    several: bool = False
    batch: int = 1
    select: Any = None


@dataclass(frozen=True)
class ForwardOptions:
    """What a call wants of its forwards behind the prefill.

    Attributes:
        taps: the hidden states that drafters learn from; entered round every forward.
        top_k: how many of every node's largest logits they learn from.
        capacity: slots that the call will need, as far as that is known.
        cache_outlives_call: whether the cache outlives the call.
        most_tokens: see :class:`Bounds`.
        recorded: whether forwards may be repeated from a recording.
        fused: whether a recording on a GPU runs small kernels as one.
        by_kernels: whether an engine's own kernels compute them.
        states: whether drafters look at hidden states of every forward.
        select: see :class:`CallOptions`.
        fixed_width: tokens per row that every forward feeds, of chains; None: as many as there are,
            filled up to the next width, of trees.
    """

    taps: FeatureTaps | None = None
    top_k: int = 0
    capacity: int = 0
    cache_outlives_call: bool = True
    most_tokens: int | None = None
    recorded: bool = False
    fused: bool = False
    by_kernels: bool = False
    states: bool = False
    select: Any = None
    fixed_width: int | None = None
