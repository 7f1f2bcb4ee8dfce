"""Compiled structures, whose sources stand in `cython_ext/`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A module, which has no file for checkers of types to read."""
