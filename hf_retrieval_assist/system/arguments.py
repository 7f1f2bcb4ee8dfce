"""What users give as arguments, read in the forms that people write them in."""

from __future__ import annotations

from typing import Any

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_count(size: int | str) -> int:
    """Bytes from a number, or a text with an optional unit: `750M`, `4G`, `4GB`, `4GiB`, powers
    of 1024 all.

    Raises:
        ValueError: a text of another form.
    """
    if not isinstance(size, str):
        return size
    digits = size.strip().upper().removesuffix("IB").removesuffix("B")
    unit = _UNITS.get(digits[-1:], 1)
    number = digits[:-1] if digits[-1:] in _UNITS else digits
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f"expected bytes such as 750M or 4G, got {size!r}") from None


def kind_of(value: Any) -> str:
    """What a value is, for an error: "int", or "the class SamAssistant instead of an object"."""
    if isinstance(value, type):
        return f"the class {value.__name__} instead of an object; write {value.__name__}(...)"
    return type(value).__name__


def require_at_least(least: int, **arguments: int) -> None:
    """ValueError for the first argument that is less."""
    for name, value in arguments.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
