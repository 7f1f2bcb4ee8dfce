"""Keys and values of texts that calls have left, for later calls whose prompts begin as they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import numpy as np
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..system.arguments import kind_of
from ..system.locks import Lock
from .kv_cache import SHARING

# Tokens that are computed in about the time in which a kept text is found and cut.
_FEWEST = 16

_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, *SHARING)

_stores: WeakSet[Prefixes] = WeakSet()


@dataclass(eq=False)
class _Kept:
    """One text that was left.

    Attributes:
        model: whose.
        space, state: what else has to be the same.
        ids: int64 [length].
        layers: the cache's, of one row; nobody writes to their tensors.
    """

    model: ref[Any]
    space: str
    state: Any
    ids: NDArray[np.int64]
    layers: Sequence[DynamicLayer]

    @property
    def nbytes(self) -> int:
        return sum([x.keys.nbytes + x.values.nbytes for x in _holding(self.layers)])

    def covers(self, other: _Kept) -> bool:
        """Whether it serves wherever another one does."""
        alike = self.model() is other.model() and self.space == other.space
        return alike and self.common(other.ids) == len(other.ids) and self.state == other.state

    def common(self, ids: NDArray[np.int64]) -> int:
        """Tokens by which both texts begin, as many of which its layers can show."""
        most = min(len(ids), len(self.ids))
        differs = np.flatnonzero(self.ids[:most] != ids[:most])
        length = int(differs[0]) if len(differs) else most
        return length if length == len(self.ids) or self._is_whole else 0

    @property
    def _is_whole(self) -> bool:
        """Whether no window has passed any token."""
        length = len(self.ids)
        return all(x.keys.shape[2] == length for x in _holding(self.layers))


class Prefixes:
    """Texts that calls have read and written, so that no later call reads their tokens again.

    What is kept are the keys and values of a call's text, in place of which a later call of the
    same model would compute the same ones. It computes those behind the longest common beginning,
    as plain `generate` does that is handed such a cache. Texts of models whose layers keep
    something else are not kept. The last used ones are, up to a number of bytes.

        assistant = SamAssistant(prefixes=Prefixes(2 << 30))

    Thread-safe; assistants may share it.

    Args:
        max_bytes: of keys and values.

    Raises:
        TypeError, ValueError: a size that is none.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
            raise TypeError(f"max_bytes: expected a number of bytes, got {kind_of(max_bytes)}")
        if max_bytes < 1:
            raise ValueError(f"max_bytes: expected at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self._space = ""
        self._kept: list[_Kept] = []  # the last used one behind the others
        self._lock = Lock()
        _stores.add(self)

    def namespace(self, name: str) -> Prefixes:
        """Those of a tenant, say, which calls of no other namespace find, within the same bound."""
        own = object.__new__(Prefixes)
        own.__dict__.update(vars(self), _space=f"{self._space}{len(name)}:{name}")
        return own

    @property
    def nbytes(self) -> int:
        """What is kept takes, of all namespaces."""
        with self._lock:
            return sum([kept.nbytes for kept in self._kept])

    def __len__(self) -> int:
        """Texts that are kept, of all namespaces."""
        return len(self._kept)

    def find(
        self, model: Any, state: Any, ids: NDArray[np.int64]
    ) -> tuple[int, DynamicCache | None]:
        """The longest beginning of a text that is kept of a model.

        Args:
            state: of the model, by which keys and values are computed.
            ids: int64 [length].

        Returns:
            Its tokens, and a cache that holds them; 0 and None where there is none.
        """
        with self._lock:
            own = [x for x in self._kept if x.space == self._space and x.model() is model]
            found = sorted(((x.common(ids), i) for i, x in enumerate(own)), reverse=True)
            for length, i in found:
                if length >= _FEWEST and own[i].state == state:
                    self._kept.remove(own[i])
                    self._kept.append(own[i])
                    return length, _cut(own[i].layers, length)
        return 0, None

    def keep(self, model: Any, state: Any, ids: NDArray[np.int64], cache: DynamicCache) -> None:
        """Keep a text that a call has left, in place of those that it begins with.

        Args:
            state: as `find` is told it.
            ids: int64 [length], the tokens that the cache holds.
            cache: of one row; nobody else goes on from it.
        """
        new = _Kept(ref(model), self._space, state, ids.copy(), cache.layers)
        if new.nbytes > self.max_bytes or not len(ids):
            return
        with self._lock:
            self._kept[:] = [
                kept for kept in self._kept if kept.model() is not None and not new.covers(kept)
            ]
            self._kept.append(new)
            taken = sum([kept.nbytes for kept in self._kept])
            while taken > self.max_bytes:
                taken -= self._kept.pop(0).nbytes

    def forget(self) -> int:
        """Drop what is kept, of a namespace only its own; how many texts that were."""
        return self._drop(lambda kept: kept.space.startswith(self._space))

    def release(self, model: Any) -> None:
        """Drop what is kept of a model."""
        self._drop(lambda kept: kept.model() is model)

    def _drop(self, chosen: Callable[[_Kept], bool]) -> int:
        with self._lock:
            known = len(self._kept)
            self._kept[:] = [kept for kept in self._kept if not chosen(kept)]
            return known - len(self._kept)

    def __repr__(self) -> str:
        return f"Prefixes({self.max_bytes})"


def release_prefixes(model: Any) -> None:
    """Drop what any `Prefixes` keep of a model."""
    for store in list(_stores):
        store.release(model)


def can_keep(cache: Any) -> bool:
    """Whether a cache holds keys and values of single tokens, and nothing else."""
    return type(cache) is DynamicCache and all(type(layer) in _KINDS for layer in cache.layers)


def _holding(layers: Sequence[DynamicLayer]) -> list[DynamicLayer]:
    """Those that hold keys and values, and do not share another's."""
    return [layer for layer in layers if layer.keys is not None]


def _cut(layers: Sequence[DynamicLayer], length: int) -> DynamicCache:
    """A cache that holds the first tokens of what layers hold, in the same memory."""
    cut = DynamicCache()
    cut.layers = [copy(layer) for layer in layers]
    for layer in _holding(cut.layers):
        if layer.get_seq_length() > length:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            if layer.is_sliding:
                layer.cumulative_length = length
    return cut
