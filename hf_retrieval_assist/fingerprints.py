"""What tells one model from another, for everything that is learnt about it."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

_fingerprints: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def fingerprint(model: Any) -> str:
    """Equal for models of equal configuration: what is learnt from outputs is kept under it."""
    if model not in _fingerprints:
        text = model.config.to_json_string(use_diff=False)
        _fingerprints[model] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _fingerprints[model]
