"""Attention of few queries on a CPU, by the kernel: in half precision always, in float32 where it
is faster on this machine.

transformers hands its attention functions one key and value head for all the query heads that
share it, and a mask. Its `sdpa` function copies shared heads for PyTorch, which then takes a time
that grows with the queries; :func:`kernel_attention` reads them once. One method serves a shape of
heads and number of threads for every number of queries and slots, chosen when that is first met.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...host.scopes import asks_for_more
from ...system.tensors import thread
from .recording import Attend, MakeAttend, UnrecordableError
from .skinny import RepeatedAttention, can_attend, in_route, kernel_attention
from .tuning import Candidates, Tuning, fastest

__all__ = ["AttentionTuning", "attention", "plain_attention"]

plain_attention = sdpa_attention_forward

METHODS = ("kernel", "pytorch")

# Numbers of queries that a choice is made for, and how many slots they see.
TUNING_QUERIES = (1, 4, 16)
TUNING_SLOTS = 512

# Scores of one group of heads that the kernel may keep at a time, 128 MiB.
MAX_SCORES = 1 << 25


def _cases(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Candidates]:
    _, heads, _, depth = query.shape
    _, groups, _, width = value.shape
    keys = torch.ones(1, groups, TUNING_SLOTS, depth, dtype=query.dtype)
    values = torch.ones(1, groups, TUNING_SLOTS, width, dtype=query.dtype)
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=False)
    for n in TUNING_QUERIES:
        queries = torch.ones(1, n, heads, depth, dtype=query.dtype).transpose(1, 2)
        mask = torch.zeros(1, 1, n, TUNING_SLOTS, dtype=query.dtype)
        yield {
            "kernel": partial(kernel_attention, queries, keys, values, mask),
            "pytorch": partial(plain_attention, module, queries, keys, values, mask),
            "serial": partial(kernel_attention, queries, keys, values, mask, threads=1),
        }


def fastest_method(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """The name in METHODS of the faster over TUNING_QUERIES; None on a machine too busy to tell."""
    with torch.no_grad():
        return fastest(_cases(query, key, value))


class AttentionTuning(Tuning):
    """Whether the kernel serves a shape of attention on this machine.

    Args:
        path: the file; by default `attention_tuning.json` in the user's cache directory.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(METHODS, "attention", path)
        self._found: dict[tuple[Any, ...], bool] = {}

    def takes_kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the kernel is to compute attention of these heads, whatever batch and lengths.

        In half precision it always is: the text depends on how it rounds, and PyTorch rounds by the
        width of a forward.
        """
        if query.dtype.itemsize < 4:
            return True
        shape = (query.shape[1], value.shape[1], query.shape[3], value.shape[3])
        case = (*shape, query.dtype, torch.get_num_threads())
        if case not in self._found:
            sizes = "x".join(map(str, shape))
            name = f"{query.dtype} {sizes} threads={torch.get_num_threads()}"
            chosen = self.name(name, lambda: fastest_method(query, key, value))
            self._found[case] = chosen == "kernel"
        return self._found[case]


TUNING = AttentionTuning()


def _takes_kernel(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> bool:
    """Whether this is attention and nothing else, of a kind that the kernel knows and is to compute
    here."""
    if not in_route() or asks_for_more(options, ("softcap",)):
        return False
    if not can_attend(query, key, value, mask):
        return False
    sharing = query.shape[1] // key.shape[1]
    if sharing != getattr(module, "num_key_value_groups", 1):
        return False
    if sharing * query.shape[2] * key.shape[2] > MAX_SCORES:
        return False
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and mask is None and query.shape[2] > 1:
        return False
    return TUNING.takes_kernel(query, key, value)


def _noted(
    module: Any,
    options: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, MakeAttend]:
    """What attention gives, and what makes what computes it anew."""
    out, _ = attention(module, query, key, value, mask, **options)
    by_kernel = _takes_kernel(module, query, key, value, mask, options)
    return out, _by_kernel if by_kernel else partial(_plainly, module)


def _by_kernel(query: torch.Tensor, options: dict[str, Any], out: torch.Tensor) -> Attend:
    again: Attend = RepeatedAttention(query, options.get("scaling"), out)
    return again


def _plainly(
    module: Any, query: torch.Tensor, options: dict[str, Any], out: torch.Tensor
) -> Attend:
    def again(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
        out.copy_(plain_attention(module, query, key, value, mask, **options)[0])

    return again


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
    if (recording := thread.recorder) is not None:
        if asks_for_more(options):
            raise UnrecordableError("attention is asked for more than its output")
        compute = partial(_noted, module, options)
        return recording.attend(compute, query, key, value, attention_mask, options), None
    if not _takes_kernel(module, query, key, value, attention_mask, options):
        return plain_attention(module, query, key, value, attention_mask, **options)
    return kernel_attention(query, key, value, attention_mask, options.get("scaling")), None
