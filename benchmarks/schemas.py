"""JSON schemas of three sizes: records as programs ask models for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SIZES = {"small": 3, "medium": 8, "large": 20}
"""Name -> members of an object."""

_WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_TEXTS, _NUMBERS, _FLAGS = _WORDS["texts"], _WORDS["numbers"], _WORDS["flags"]
_CHOICES, _THINGS = _WORDS["choices"], _WORDS["things"]


class Asked(NamedTuple):
    """What a model is asked for."""

    size: str
    prompt: str
    schema: dict[str, Any]


def schemas(size: str, count: int, seed: int) -> Iterator[Asked]:
    """Schemas of a size, the same ones for the same seed."""
    rng = random.Random(f"{size} {seed}")
    for number in range(count):
        thing = _THINGS[number % len(_THINGS)]
        record = _record(SIZES[size], rng, nested=size != "small")
        yield Asked(size, f"A {thing} as JSON:\n", record)


def _record(members: int, rng: random.Random, nested: bool) -> dict[str, Any]:
    """An object, with objects and arrays of objects among its members where it is nested."""
    names = rng.sample([*_TEXTS, *_NUMBERS, *_FLAGS, *_CHOICES], members)
    properties = {name: _member(name) for name in names}
    if nested:
        for name in names[2::5]:
            inner = _record(3, rng, nested=False)
            several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
            properties[f"{name}_details"] = inner if rng.random() < 0.5 else several
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _member(name: str) -> dict[str, Any]:
    if name in _CHOICES:
        return {"enum": _CHOICES[name]}
    if name in _FLAGS:
        return {"type": "boolean"}
    if name in _NUMBERS:
        return {"type": "integer", "minimum": 0, "maximum": 9999}
    return {"type": "string", "maxLength": 16}
