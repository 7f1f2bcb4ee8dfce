"""What tells one model from another, for everything that is learnt about it."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any

_fingerprints: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


# Settings of a run and of the library, which leave the model what it is.
_PASSING = ("transformers_version", "dtype", "use_cache", "return_dict")


def fingerprint(model: Any) -> str:
    """Equal for models of one name and configuration: what is learnt from outputs is kept under it.

    It outlives an update of transformers and does not depend on settings of a run, such as the
    dtype.
    """
    if model not in _fingerprints:
        _fingerprints[model] = config_fingerprint(model.config)
    return _fingerprints[model]


def config_fingerprint(config: Any) -> str:
    """`fingerprint` of the models that have this configuration."""
    facts = [config.name_or_path, _lasting(config.to_diff_dict())]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lasting(settings: Any) -> Any:
    """The settings, those of nested configurations among them, without passing ones."""
    if not isinstance(settings, dict):
        return settings
    return {
        str(name): _lasting(value)
        for name, value in settings.items()
        if name not in _PASSING and not str(name).startswith(("output_", "_attn"))
    }
