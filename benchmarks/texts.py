"""Token streams to index: natural, recorded, and those that are worst for suffix structures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .traces import read_traces

Int32Array = NDArray[np.int32]


def natural(length: int, vocab_size: int = 32_000, seed: int = 0) -> Int32Array:
    """Tokens like text: Zipf's law over them, and passages copied from earlier.

    About half of the tokens are fresh and half belong to copies of 2 to 60 tokens.
    """
    rng = np.random.default_rng(seed)
    ranks = vocab_size ** rng.random(length) - 1
    text = rng.permutation(vocab_size)[ranks.astype(np.int64)].astype(np.int32)
    here = 64
    while here < length:
        span = int(rng.integers(2, 60))
        source = int(rng.integers(0, here))
        copied = text[source : min(source + span, here)]
        room = min(len(copied), length - here)
        text[here : here + room] = copied[:room]
        here += span + int(rng.integers(2, 60))
    return text


def recorded(folder: Path, length: int) -> Int32Array:
    """The first tokens of all that the traces of a folder hold: requests in order, then corpora."""
    traces = read_traces(folder)
    requests = [ids for trace in traces for request in trace.requests for ids in request]
    corpora = [ids for trace in traces for ids in trace.corpus]
    return np.concatenate([*requests, *corpora])[:length]


def repeated(length: int) -> Int32Array:
    """One token throughout."""
    return np.zeros(length, dtype=np.int32)


def fibonacci(length: int) -> Int32Array:
    """The Fibonacci word, which has the most repetitions without being periodic."""
    a, b = [0, 1], [0]
    while len(a) < length:
        a, b = a + b, a
    return np.array(a[:length], dtype=np.int32)


def de_bruijn(length: int, order: int = 16) -> Int32Array:
    """Bits in which every word of `order` bits occurs once: the most distinct substrings.

    Concatenates, in order, the Lyndon words whose lengths divide `order`.
    """
    bits: list[int] = []
    word = [-1]
    while word and len(bits) < length:
        word[-1] += 1
        size = len(word)
        if order % size == 0:
            bits += word
        while len(word) < order:
            word.append(word[-size])
        while word and word[-1] == 1:
            word.pop()
    return np.resize(np.array(bits, dtype=np.int32), length)


# The hard ones.
HARD = {"repeated": repeated, "fibonacci": fibonacci, "de_bruijn": de_bruijn}
