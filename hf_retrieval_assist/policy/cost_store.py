"""Cost models by what t(n) depends on, kept from one process to the next."""

from __future__ import annotations

import atexit
import hashlib
import json
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..system.files import read_kept, user_cache_directory, write_kept
from ..system.locks import Lock
from .cost_model import CostModel, CostView

_FORMAT = 3
_SAVE_INTERVAL = 60.0  # seconds
_TIMING_PERIOD = 8  # steps without drafts, which are all alike, of which one is timed


def size_bucket(size: int) -> int:
    """The smallest power of two that is not below `size`: sizes of one bucket share a curve."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class CostKey:
    """What t(n) depends on; cache length and batch size as buckets, see `size_bucket`.

    Where rows are packed, n counts the tokens of all of them, otherwise those of each.
    `manner` tells forwards that are recorded or compiled from those that run kernel by kernel, and
    those behind which tokens are chosen for all nodes.
    """

    fingerprint: str
    device: str
    dtype: str
    attention: str
    batch_size: int = 1
    cache_length: int = 0
    packed: bool = False
    manner: str = ""

    def name(self) -> str:
        """The key within its fingerprint's file."""
        fields = asdict(self)
        del fields["fingerprint"]
        return json.dumps(fields, sort_keys=True)

    def distance(self, other: CostKey) -> float:
        """How far apart two keys of one setting are, in doublings."""
        batch = abs(self.batch_size.bit_length() - other.batch_size.bit_length())
        cache = abs(self.cache_length.bit_length() - other.cache_length.bit_length())
        return 4.0 * batch + cache

    @property
    def setting(self) -> tuple[str, str, str, str, bool, str]:
        """What a curve cannot be carried across."""
        of_model = self.fingerprint, self.device, self.dtype, self.attention
        return *of_model, self.packed, self.manner


# The same one when this module is loaded anew.
_ALIVE: weakref.WeakSet[CostModels] = globals().setdefault("_ALIVE", weakref.WeakSet())


@atexit.register
def _save_at_exit() -> None:
    for models in list(_ALIVE):
        models.save_rest()


class CostModels:
    """One `CostModel` per key; until it is timed, it knows what the nearest timed one knows.
    Thread-safe.

    Args:
        directory: where `save` keeps one JSON file per fingerprint and from where a fingerprint's
            models are read when it is first asked for; None keeps nothing on disk.
    """

    def __init__(self, directory: Path | None = None):
        self.directory = directory
        self._writable = True
        self._models: dict[CostKey, CostModel] = {}
        self._loaded: set[str] = set()
        self._next_save = 0.0  # as time.monotonic() counts
        self._unsaved: set[str] = set()  # fingerprints that `save_at_times` left for later
        self._lock = Lock()
        _ALIVE.add(self)

    @staticmethod
    def user_directory() -> Path | None:
        """Where cost models live between processes: a folder of the user's cache directory. None,
        and a warning, where there is none."""
        folder = user_cache_directory()
        return folder and folder / "cost"

    def get(self, key: CostKey) -> CostModel:
        """The model of `key`, the same object each time."""
        with self._lock:
            if key.fingerprint not in self._loaded:
                self._loaded.add(key.fingerprint)
                self._load(key.fingerprint)
            if key not in self._models:
                self._models[key] = CostModel(_device_type(key))
            model = self._models[key]
            if not model.timed and (nearest := self._nearest_timed(key)):
                model.borrow(self._models[nearest])
            return model

    def timed(self) -> dict[CostKey, CostModel]:
        """The models that were timed."""
        with self._lock:
            return {key: model for key, model in self._models.items() if model.timed}

    def _nearest_timed(self, key: CostKey) -> CostKey | None:
        alike = [k for k, m in self._models.items() if m.timed and k.setting == key.setting]
        return min(alike, key=key.distance, default=None)

    def save(self, fingerprint: str) -> None:
        """Write the fingerprint's models to its file, in one step; nothing without a directory."""
        if self.directory is None:
            return
        with self._lock:
            models = {k.name(): m for k, m in self._models.items() if k.fingerprint == fingerprint}
        states = {name: model.state() for name, model in models.items() if model.timed}
        content = {"format": _FORMAT, "fingerprint": fingerprint, "models": states}
        write_kept(self.directory / _file_name(fingerprint), content)

    def save_at_times(self, fingerprint: str) -> None:
        """`save`, at most once a minute and when the process ends; for the end of every call.

        Where the directory cannot be written, one warning tells so and nothing more is tried.
        """
        now = time.monotonic()
        with self._lock:
            if fingerprint in self._loaded:
                self._unsaved.add(fingerprint)
            if not self._unsaved or now < self._next_save:
                return
            self._next_save = now + _SAVE_INTERVAL
        self.save_rest()

    def save_rest(self) -> None:
        """Save what `save_at_times` left for later."""
        with self._lock:
            fingerprints, self._unsaved = self._unsaved, set()
        try:
            for fingerprint in fingerprints if self._writable else ():
                self.save(fingerprint)
        except OSError as error:
            warnings.warn(f"timings are not kept in {self.directory}: {error}", stacklevel=3)
            self._writable = False

    def _load(self, fingerprint: str) -> None:
        """Read a fingerprint's file; a damaged one is reported and ignored."""
        if self.directory is not None:
            path, read = self.directory / _file_name(fingerprint), partial(_models_of, fingerprint)
            self._models.update(read_kept(path, "the saved timings", read) or {})


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
        manner: str,
        widths: Sequence[int] = (),
        packed: int = 0,
        alike: bool = False,
    ) -> CostModel:
        """What is known of the next forward, as the tokens of one running row see it.

        Args:
            length: tokens of the longest row in the cache.
            manner: see `CostKey`.
            widths, alike: see `CostView`.
            packed: rows that are fed together without padding; 0: rows are padded.
        """
        asked = size_bucket(length), manner, widths, packed, alike
        if self._cost is None or not self._cost.timed or asked != self._asked:
            key = replace(self._key, cache_length=asked[0], packed=packed > 0, manner=manner)
            self._asked, self._key = asked, key
            self._cost = self._price = self._costs.get(key)
            if packed or widths:
                self._price = CostView(self._cost, widths, max(1, packed), alike)
        assert self._price is not None
        return self._price

    def learn(self, tokens: int, seconds: float, plain: bool, typical: bool) -> None:
        """A step that was priced last fed so many tokens per row, or of all packed rows. `plain`:
        nobody was asked for a draft. `typical`: other steps will take as long."""
        self._plain = self._plain + 1 if plain else 0
        if self._plain % _TIMING_PERIOD == 0 and typical:
            assert self._cost is not None
            self._cost.observe(tokens, seconds)


def _file_name(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:32] + ".json"


def _device_type(key: CostKey) -> str:
    return key.device.partition(":")[0]


def _models_of(fingerprint: str, content: Any) -> dict[CostKey, CostModel]:
    """A file's models; an error of some kind where it is not one that `CostModels.save` wrote."""
    if (content["format"], content["fingerprint"]) != (_FORMAT, fingerprint):
        raise ValueError(f"expected format {_FORMAT} and the models of {fingerprint!r}")
    models = {}
    for name, state in content["models"].items():
        key = CostKey(fingerprint, **json.loads(name))
        if any(type(value) is not type(getattr(_ANY, field)) for field, value in vars(key).items()):
            raise ValueError(f"expected a key with values as in {_ANY.name()}, got {name!r}")
        models[key] = CostModel(_device_type(key))
        models[key].restore(state)
    return models


_ANY = CostKey("", "", "", "")
