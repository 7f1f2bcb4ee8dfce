"""Cost models by what t(n) depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..system.locks import Lock
from .cost_model import CostModel, CostView

_MOST_MODELS = 256
_TIMING_PERIOD = 8  # steps without drafts, which are all alike, of which one is timed


def size_bucket(size: int) -> int:
    """The smallest power of two that is not below `size`: sizes of one bucket share a curve."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class CostKey:
    """What t(n) depends on; cache length and batch size as buckets, see `size_bucket`.

    Where rows are packed, n counts the tokens of all of them, otherwise those of each.
    `cost_variant` tells forwards that are recorded or compiled from those that run kernel by
    kernel, and those behind which tokens are chosen for all nodes.
    """

    fingerprint: str
    device: str
    dtype: str
    attention: str
    batch_size: int = 1
    cache_length: int = 0
    packed: bool = False
    cost_variant: str = ""

    def distance(self, other: CostKey) -> float:
        """How far apart two keys of one setting are, in doublings."""
        batch = abs(self.batch_size.bit_length() - other.batch_size.bit_length())
        cache = abs(self.cache_length.bit_length() - other.cache_length.bit_length())
        return 4.0 * batch + cache

    @property
    def setting(self) -> tuple[str, str, str, str, bool, str]:
        """What a curve cannot be carried across."""
        of_model = self.fingerprint, self.device, self.dtype, self.attention
        return *of_model, self.packed, self.cost_variant


class CostModels:
    """One `CostModel` per key, which starts from what the nearest timed one knows.

    Thread-safe. The oldest go where there are many.
    """

    def __init__(self) -> None:
        self._models: dict[CostKey, CostModel] = {}
        self._lock = Lock()

    def get(self, key: CostKey) -> CostModel:
        """The model of `key`, the same object each time."""
        with self._lock:
            if key not in self._models:
                if len(self._models) == _MOST_MODELS:
                    del self._models[next(iter(self._models))]
                # A CPU, which packs rows, takes as long for each further token.
                model = CostModel(hope=1.0) if key.packed else CostModel()
                if nearest := self._nearest_timed(key):
                    model.start_from(self._models[nearest])
                self._models[key] = model
            return self._models[key]

    def _nearest_timed(self, key: CostKey) -> CostKey | None:
        alike = [k for k, m in self._models.items() if m.observations and k.setting == key.setting]
        return min(alike, key=key.distance, default=None)


OF_PROCESS = CostModels()
"""What assistants that were given none have learnt in this process."""


class CallCosts:
    """t(n) of one call's forwards, under a key that changes while its cache grows.

    Args:
        costs: where it is kept.
        key: of the call.
    """

    def __init__(self, costs: CostModels, key: CostKey):
        self._costs, self._key = costs, key
        self._asked: tuple[Any, ...] = ()
        self._cost: CostModel | None = None
        self._price: CostModel | None = None  # the same, as the tokens of one row see it
        self._plain = 0  # steps since somebody drafted

    def at(
        self,
        length: int,
        cost_variant: str,
        widths: Sequence[int] = (),
        packed: int = 0,
    ) -> CostModel:
        """What is known of the next forward, as the tokens of one running row see it.

        Args:
            length: tokens of the longest row in the cache.
            cost_variant: see `CostKey`.
            widths: see `CostView`.
            packed: rows that are fed together without padding; 0: rows are padded.
        """
        asked = size_bucket(length), cost_variant, widths, packed
        if self._cost is None or asked != self._asked:
            key = replace(
                self._key, cache_length=asked[0], packed=packed > 0, cost_variant=cost_variant
            )
            self._asked, self._key = asked, key
            self._cost = self._price = self._costs.get(key)
            if packed or widths:
                self._price = CostView(self._cost, widths, max(1, packed))
        assert self._price is not None
        return self._price

    def learn(self, tokens: int, seconds: float, plain: bool, typical: bool) -> None:
        """A step that was priced last fed so many tokens per row, or of all packed rows. `plain`:
        nobody was asked for a draft. `typical`: other steps will take as long."""
        self._plain = self._plain + 1 if plain else 0
        if self._plain % _TIMING_PERIOD == 0 and typical:
            assert self._cost is not None
            self._cost.observe(tokens, seconds)
