"""What this package needs of others: versions that are supported, and modules of its extras."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

OLDEST = {"torch": "2.6", "transformers": "5.17"}


def require_supported_versions() -> None:
    """ImportError where torch or transformers is missing or too old.

    pip sees to both; an environment that was put together otherwise is told what is wrong with it
    before something deep inside fails.
    """
    for name, oldest in OLDEST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or Version(found) < Version(oldest):
            raise ImportError(
                f"{name}: hf_retrieval_assist expected {oldest} or newer, got {found}; "
                f"pip install --upgrade {name}"
            )


def require_compiled() -> None:
    """ImportError in a source tree whose extensions have not been compiled."""
    if find_spec("hf_retrieval_assist.structures.draft_tree") is None:
        raise ImportError(
            "hf_retrieval_assist: expected its compiled structures, got a tree without them, which "
            "hides an installed package; run `pip install --editable .` in it, or `make build`"
        )


def of_extra(module: str, needs: str, packages: str = "") -> Any:
    """A module; where there is none, an ImportError that says what needs it and what brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{needs}: pip install {packages or module}") from error
