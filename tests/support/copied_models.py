"""Tiny models that are large enough for copies of their weights, and what is read of copies."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import transformers

from hf_retrieval_assist.engines.cpu import compact
from hf_retrieval_assist.engines.cpu.screen import Screened
from hf_retrieval_assist.engines.cpu.skinny import skinny_linear

from .lossless import build

TOKENS, HIDDEN = 4096, 64


def model_of(kind=transformers.LlamaForCausalLM, **options):
    """A model of which a token follows on the last one with some certainty, as in trained ones."""
    untied = {"tie_word_embeddings": False}
    model = build(kind, vocab_size=TOKENS, hidden_size=HIDDEN, **untied | options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


@contextmanager
def watch_screens():
    """Counts of the rows that were screened, and of those of which all logits were asked."""
    seen = SimpleNamespace(screened=0, whole=0)
    init, whole = Screened.__init__, Screened.whole

    def look(found, screen, x):
        seen.screened += len(x)
        init(found, screen, x)

    def compute(found, row):
        seen.whole += 1
        return whole(found, row)

    with mock.patch.multiple(Screened, __init__=look, whole=compute):
        yield seen


@contextmanager
def compact_products():
    """Rows of each product with a copy in bfloat16."""
    rows = []

    def count(x, *others):
        rows.append(x.numel() // x.shape[-1])
        return skinny_linear(x, *others)

    with mock.patch.object(compact, "skinny_linear", count):
        yield rows
