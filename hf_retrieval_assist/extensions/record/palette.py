"""Colours of sources, told apart by readers who see few colours too (Okabe and Ito, 2008)."""

from __future__ import annotations

from collections.abc import Iterable

from .steps import MODEL

_OWN = {
    "text": "#0072b2",
    "memory": "#009e73",
    "corpus": "#e69f00",
    "logit n-grams": "#cc79a7",
    "token recycling": "#cc79a7",
    "draft model": "#d55e00",
    "eagle": "#d55e00",
    "grammar": "#56b4e9",
}
_OTHERS = ("#f0e442", "#999999")


def colours(origins: Iterable[str]) -> dict[str, str]:
    """Source -> "#rrggbb", the same in every record; none for the model itself."""
    named = [origin for origin in origins if origin != MODEL]
    spare = [origin for origin in named if origin not in _OWN]
    return {
        origin: _OWN.get(origin) or _OTHERS[spare.index(origin) % len(_OTHERS)] for origin in named
    }
