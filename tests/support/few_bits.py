"""Drafts of tiny models by themselves, in few bits."""

from types import SimpleNamespace
from weakref import WeakKeyDictionary

from hf_retrieval_assist.engines.cpu import few_bits, quantized_self, weight_copies


def pack_small(monkeypatch):
    """Let small layers be packed too; returns what a level takes, for drafters: nothing, and they
    do not learn more."""
    price = SimpleNamespace(seconds=0.0, refused=0.0)
    price.timed, price.observe = lambda texts: price.seconds, lambda texts, seconds: None
    monkeypatch.setattr(quantized_self, "_Levels", lambda: price)
    monkeypatch.setattr(quantized_self, "_levels", WeakKeyDictionary())
    for part in (few_bits, weight_copies):
        monkeypatch.setattr(part, "LEAST_ELEMENTS", 1000)
    return price
