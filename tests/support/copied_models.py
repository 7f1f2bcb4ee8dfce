"""Tiny models that are large enough for copies of their weights, and what is read of copies."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import transformers

from hf_retrieval_assist.engines.cpu import copies, repeated_forward
from hf_retrieval_assist.engines.cpu.copies import Copies
from hf_retrieval_assist.engines.cpu.screen import Screened

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
def compact_forwards():
    """Tokens of each forward that read copies in bfloat16."""
    tokens, weights = [], Copies.weights

    def count(copies, fed):
        found = weights(copies, fed)
        if found is not None:
            tokens.append(fed)
        return found

    with mock.patch.object(Copies, "weights", count):
        yield tokens


def read_at_once(monkeypatch):
    """Let forwards be recorded, and weights be copied, as soon as that can be."""
    monkeypatch.setattr(repeated_forward, "PATIENCE", 0)
    monkeypatch.setattr(copies, "PATIENCE", 1)
    monkeypatch.setattr(copies, "LEAST_SAVED", 0)  # these models are too small for it
