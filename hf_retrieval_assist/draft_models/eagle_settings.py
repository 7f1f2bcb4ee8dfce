"""Values of a head's config.json, which is untrusted: each is checked before anything uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The kinds whose frequencies do not change with the length of the text, and what each must state.
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LARGEST = 1e12


def number(
    settings: Mapping[str, Any],
    name: str,
    least: float,
    most: float = _LARGEST,
    default: Any = None,
) -> Any:
    """A number, where it is stated.

    Raises:
        ValueError: it is none, or out of range; or there is none and no default either.
    """
    value = settings.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {value!r}")
    return value


def count(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number from 1 on; arguments and errors as for `number`."""
    value = number(settings, name, 1, default=default)
    if not isinstance(value, int):
        raise ValueError(f"{name}: expected a whole number, got {value!r}")
    return value


def rope_parameters(layer: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as the config of a head's layer states it, in the fields of transformers 5."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ValueError(f"rope_parameters: expected one set for all layers, got {given!r}")
    theta = given.get("rope_theta") or layer.get("rope_theta") or 10000.0
    kind = given.get("rope_type") or given.get("type") or "default"
    return checked_rope({**given, "rope_theta": theta, "rope_type": kind})


def checked_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the kind of RoPE has.

    Raises:
        ValueError: the kind is unknown, or a parameter missing or out of range.
    """
    kind = given.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ValueError(
            f"rope_parameters: expected rope_type to be one of {(*ROPE_KINDS,)}, got {dict(given)}"
        )
    required = ROPE_KINDS[kind]
    options = [name for name in _YARN_OPTIONS if kind == "yarn" and given.get(name) is not None]
    found = {name: number(given, name, 1e-6) for name in (*required, *options)}
    if kind == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
        raise ValueError(
            "low_freq_factor: expected less than the high_freq_factor "
            f"{found['high_freq_factor']}, got {found['low_freq_factor']}"
        )
    if kind == "yarn" and given.get("truncate") is not None:
        found["truncate"] = bool(given["truncate"])
    # A base of 1 turns no position at all.
    theta = float(number(given, "rope_theta", 1 + 1e-6))
    return {"rope_type": kind, "rope_theta": theta, **found}
