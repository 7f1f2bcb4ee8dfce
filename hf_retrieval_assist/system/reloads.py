"""Modules of the package that were loaded again (`importlib.reload`, `%autoreload`, an import after
`del sys.modules[...]`) while others still hold what they had taken from them."""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from typing import Any

_PACKAGE = f"{__name__.partition('.')[0]}."


class Loaded:
    """The package's modules as they were loaded first; compiled ones are never loaded again."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}
        self._count = 0

    def why_stale(self) -> str | None:
        """Why the modules cannot be trusted to fit together; None: each was loaded once."""
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            for name in [*sys.modules]:
                if name.startswith(_PACKAGE):
                    self._specs.setdefault(name, _spec(name))
        modules = sys.modules
        for name, spec in self._specs.items():
            if spec is not None and getattr(modules.get(name), "__spec__", None) is spec:
                continue
            # What has been deleted may come again, and what a test puts there has no spec.
            if (found := _spec(name)) is not spec and None not in (found, spec):
                return (
                    f"{name} was loaded anew while the rest of the package holds what it was "
                    "before; restart the process"
                )
        return None


# The same one when this module is loaded anew.
LOADED: Loaded = globals().setdefault("LOADED", Loaded())


def _spec(name: str) -> Any:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return None if isinstance(getattr(spec, "loader", None), ExtensionFileLoader) else spec


def is_of(kind: type, value: Any) -> bool:
    """Whether a value is of a class, or of what that was before its module was loaded anew."""
    name = kind.__module__, kind.__qualname__
    return any((base.__module__, base.__qualname__) == name for base in type(value).__mro__)
