"""Corpora built on the machines of a Ray cluster, which tokenise texts and sort shards."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from ...corpus.readers import NamedText, load_encoder, text_batches
from ...system.versions import of_extra
from ...types.token_tree import NamedIds

_RETRIES = 10  # a task's whose worker or machine was lost
_AHEAD = 2  # batches of text on their way for each processor


class RayExecutor(Executor):
    """Runs functions as tasks of a Ray cluster; where a worker is lost, its task runs again.

    The machines need this package, and must see the files that a function reads and writes under
    the same names.

    Args:
        address: of the cluster: "auto" for the one that this machine belongs to, "local" for a new
            one on this machine alone, or its host and port.

    Raises:
        ImportError: the `ray` extra is not installed.
        ConnectionError: there is no cluster at `address`.
    """

    def __init__(self, address: str) -> None:
        self._ray = ray = of_extra("ray", "a cluster needs", "'ray[data]' pydivsufsort")
        self._connected = not ray.is_initialized()
        if self._connected:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._tasks: dict[Callable[..., Any], Any] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn(*args, **kwargs)` somewhere; everything must be picklable."""
        if fn not in self._tasks:
            self._tasks[fn] = self._ray.remote(max_retries=_RETRIES)(fn)
        return self._tasks[fn].remote(*args, **kwargs).future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, unless the process had joined it before."""
        if self._connected:
            self._ray.shutdown()

    def encode_stream(self, tokenizer: str, texts: Iterable[NamedText]) -> Iterator[NamedIds]:
        """Token ids of each text in order, as `TextEncoder.encode_stream` gives them.

        Args:
            tokenizer: its place, as :func:`load_encoder` takes it, for all machines the same.
            texts: read here, a few batches ahead.
        """
        place = str(Path(tokenizer).resolve()) if Path(tokenizer).exists() else tokenizer
        ahead = _AHEAD * int(self._ray.cluster_resources().get("CPU", 1))
        running: deque[Future[list[NamedIds]]] = deque()
        for batch in text_batches(texts):
            running.append(self.submit(_encode, place, batch))
            if len(running) > ahead:
                yield from running.popleft().result()
        for future in running:
            yield from future.result()


# A worker tokenises many batches.
_encoder = functools.lru_cache(maxsize=1)(load_encoder)


def _encode(tokenizer: str, texts: list[NamedText]) -> list[NamedIds]:
    found = _encoder(tokenizer).encode_batch(texts)
    return [NamedIds(name, np.array(ids, np.int32)) for name, ids in found]
