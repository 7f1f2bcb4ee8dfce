"""Attention of few queries on a CPU, by the kernel.

transformers hands its attention functions one key and value head for all the query heads that
share it, and a mask. Its `sdpa` function copies shared heads for PyTorch, which then takes a time
that grows with the queries; :func:`kernel_attention` reads them once. It serves as many queries of
a row as :mod:`~.linear` serves rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...host.scopes import asks_for_more
from ...system.tensors import thread
from .skinny import can_attend, in_route, kernel_attention

plain_attention = sdpa_attention_forward

# Scores of one group of heads that the kernel may keep at a time, 128 MiB.
MAX_SCORES = 1 << 25


def kernel_result(
    module: Any,
    options: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """[batch, queries, heads, width] by the kernel; None where this is more than attention, of a
    kind that the kernel does not know, or not to be computed here."""
    if not in_route() or asks_for_more(options, ("softcap",)):
        return None
    if not can_attend(query, key, value, mask):
        return None
    sharing = query.shape[1] // key.shape[1]
    if sharing != getattr(module, "num_key_value_groups", 1):
        return None
    if sharing * query.shape[2] * key.shape[2] > MAX_SCORES:
        return None
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and mask is None and query.shape[2] > 1:
        return None
    result: torch.Tensor = kernel_attention(query, key, value, mask, options.get("scaling"))
    return result


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What is computed in the place of transformers' `sdpa` function (see :mod:`.scopes`), with its
    arguments and result: [batch, queries, heads, width].
    """
    given, compute = (query, key, value, attention_mask), partial(kernel_result, module, options)
    if (recording := thread.recorder) is not None:
        return recording.attend(compute, *given, options.get("scaling")), None
    result = compute(*given)
    return plain_attention(module, *given, **options) if result is None else (result, None)
