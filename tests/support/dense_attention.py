"""Attention of the kernels of Triton by its definition, where there is no Triton."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F

from hf_retrieval_assist.engines.cuda import engine as cuda_engine


class DenseAttention:
    """Stands for :class:`hf_retrieval_assist.engines.cuda.triton_attention.TritonAttention`.

    Attributes:
        widths: of the queries that it was given.
    """

    widths: ClassVar[list[int]] = []

    def __init__(self, seen, name):
        self._seen = seen

    def __call__(self, plain, module, query, key, value, mask, **options):
        seen = self._seen.get(mask.data_ptr())
        if seen is None:
            return plain(module, query, key, value, mask, **options)
        self.widths.append(query.shape[2])
        shown = _shown(seen, key.shape[2])
        sharing = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
        scale = options.get("scaling")
        out = F.scaled_dot_product_attention(query, key, value, shown[:, None], scale=scale)
        return out.transpose(1, 2).contiguous(), None


def _shown(seen, capacity):
    """bool [batch, width, capacity]"""
    columns = torch.arange(capacity)
    length = (seen.first + seen.kept)[:, None]
    entries = (columns - length + 1).clamp(0, seen.columns + 1)
    shown = seen.table.gather(2, entries[:, None].expand(-1, seen.table.shape[1], -1))
    shown = shown & (columns >= seen.first[:, None])[:, None]
    if seen.unseen is not None:
        shown = shown & (columns > seen.unseen)
    return shown if seen.hidden is None else shown & ~seen.hidden[:, None]


def install(monkeypatch):
    """Let it compute attention; returns the widths that it will be given."""
    monkeypatch.setattr(cuda_engine, "has_triton", lambda device: True)
    module = SimpleNamespace(TritonAttention=DenseAttention)
    monkeypatch.setitem(sys.modules, "hf_retrieval_assist.engines.cuda.triton_attention", module)
    DenseAttention.widths.clear()
    return DenseAttention.widths
