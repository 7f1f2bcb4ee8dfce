"""What users give as arguments, read in the forms that people write them in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_count(size: int | str, name: str = "") -> int:
    """Bytes from a number, or a text with an optional unit: `750M`, `4G`, `4GB`, `4GiB`, powers
    of 1024 all.

    Raises:
        ValueError: a text of another form, for the argument `name`.
    """
    if not isinstance(size, str):
        return size
    digits = size.strip().upper().removesuffix("IB").removesuffix("B")
    unit = _UNITS.get(digits[-1:], 1)
    number = digits[:-1] if digits[-1:] in _UNITS else digits
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        expected = f"{name and name + ': '}expected bytes such as 750M or 4G"
        raise ValueError(f"{expected}, got {size!r}") from None


def kind_of(value: Any) -> str:
    """What a value is, for an error: "int", or "the class SamAssistant instead of an object"."""
    if isinstance(value, type):
        return f"the class {value.__name__} instead of an object; write {value.__name__}(...)"
    return type(value).__name__


def require_several(name: str, values: Any, expected: str) -> None:
    """TypeError for the argument `name` that is nothing to go through one by one, or one thing
    whose parts would be taken for several: a text, a mapping or a table."""
    table = isinstance(values, Mapping) or hasattr(values, "columns")
    single = table or isinstance(values, (str, bytes, type)) or not isinstance(values, Iterable)
    if single:
        hint = "; of a table, its column of texts" if table else ""
        hint = "; a single text stands in a list" if isinstance(values, (str, bytes)) else hint
        raise TypeError(f"{name}: expected {expected}, got {kind_of(values)}{hint}")


def encodable(name: str, text: str) -> str:
    """The text; ValueError for `name` if it has half a surrogate pair, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected text, got one with {error.reason}") from None
    return text


def real_number(name: str, value: Any) -> Any:
    """The value, a number of any kind; TypeError for the argument `name` if it is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {kind_of(value)}")
    return value


def whole_number(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """The value, a whole number between bounds.

    Raises:
        TypeError: for the argument `name`, if it is no number.
        ValueError: if it is not whole, or out of bounds.
    """
    if not float(real_number(name, value)).is_integer():
        raise ValueError(f"{name}: expected a whole number, got {value}")
    if not least <= value <= most:
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return int(value)


def require_at_least(least: int, **arguments: int) -> None:
    """ValueError for the first argument that is less."""
    for name, value in arguments.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
