"""Linear layers of few rows on a CPU, computed by the kernel, which reads the weights once for all.

Within a scope of :class:`~.reroute.reroute` products of up to `FEW_ROWS` rows are the kernel's, and
where drafts are verified those of up to `MAX_ROWS`, a token and 64 drafts. Its bits do not depend
on rows, so that a token's logits do not depend on how many draft tokens are verified beside it.
Others are PyTorch's, as those of longer prompts, for which it takes less time, and which plain
decoding feeds at once as well. By AMX the kernel takes less time for `MAX_ROWS` of a prompt, too;
and a fifth of PyTorch's for any rows in half precision where this CPU has no instructions for it
that oneDNN uses (`ANY_ROWS`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from ...system.tensors import thread
from .library_weights import library_linear
from .skinny import in_route, routed_linear

plain_linear = torch._C._nn.linear

# The types of weights whose values are what lies in memory.
_DENSE = (nn.Parameter, torch.Tensor)

Override = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, bias) -> `x @ weight.T + bias`, of the weight that it stands for."""


class _Overrides(threading.local):
    """What stands for weights of this thread's linear layers, by the identity of the parameter."""

    by_id: Mapping[int, Override] = MappingProxyType({})


overrides = _Overrides()


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What stands for `torch.nn.functional.linear`: plain Python, so that `torch.compile` can trace
    it, which then puts PyTorch's own into the graph.
    """
    if torch.compiler.is_compiling():
        return plain_linear(input, weight, bias)
    if (recording := thread.recorder) is not None:
        return recording.linear(linear, input, weight, bias)
    override = overrides.by_id.get(id(weight))
    if override is not None and in_route():
        return override(input, bias)
    if type(weight) in _DENSE:
        return routed_linear(input, weight, bias)
    return library_linear(input, weight, bias)


linear.stands_for = plain_linear  # type: ignore[attr-defined]
