"""Drafts of tiny models by themselves, in few bits."""

from types import SimpleNamespace
from weakref import WeakKeyDictionary

from hf_retrieval_assist.engines.cpu import few_bits, quantized_self, weight_copies


def pack_small(monkeypatch):
    """Let small layers be packed too; returns what a level takes, for drafters: nothing, and they
    do not learn more."""
    price = SimpleNamespace(seconds=0.0, observe=lambda seconds: None)
    monkeypatch.setattr(quantized_self, "_Price", lambda: price)
    monkeypatch.setattr(quantized_self, "_prices", WeakKeyDictionary())
    for part in (few_bits, weight_copies):
        monkeypatch.setattr(part, "LEAST_ELEMENTS", 1000)
    return price
