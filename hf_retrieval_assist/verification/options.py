"""What calls want of a model's forwards, told to whatever runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..host.feature_taps import FeatureTaps


@dataclass(frozen=True)
class ServiceDemand:
    """What a model's test has to find out of its forwards.

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
    """What a call wants of its forwards.

    Attributes:
        batch: rows.
        capacity: slots of each row that it will need, as far as that is known.
        taps: the hidden states that drafters learn from; entered round every forward.
        top_k: how many of every node's largest logits they learn from.
        all_logits: whether they learn from all of them.
        select: what chooses the tokens of rows on their own; None: more is done with logits.
        cache_outlives_call: whether anybody can go on from the cache after the call.
        recorded: whether forwards may be repeated from a recording.
        fused: whether a recording on a GPU runs small kernels as one.
        fixed_width: tokens per row that every forward feeds, of chains; None: as many as there are,
            filled up to the next width, of trees.
        reroute, extra_memory: the assistant's.
        several: whether the model is spread over processes, which have to compute the same bits.
    """

    batch: int = 1
    capacity: int = 0
    taps: FeatureTaps | None = None
    top_k: int = 0
    all_logits: bool = False
    select: Any = None
    cache_outlives_call: bool = True
    recorded: bool = False
    fused: bool = False
    fixed_width: int | None = None
    reroute: bool = False
    extra_memory: int | None = None
    several: bool = False
