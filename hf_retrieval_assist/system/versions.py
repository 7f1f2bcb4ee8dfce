"""Which versions of what this package works inside are supported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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
