"""The command `hf-retrieval-assist cache`."""

from __future__ import annotations

import shutil
from enum import StrEnum

from typer import Argument

from ...system.files import user_cache_directory

# Kind -> (what it is, names in the package's folder of the user's cache directory).
_KINDS = {
    # Timings of earlier versions, and what a conversion that was killed has left, are among them.
    "kernels": ("which kernels are fastest on this machine", ("*_tuning.json", "cost")),
    "model": ("the demo's models, unpacked", ("gemma-*", "smollm2-*", "unpacking-*")),
}
_NAMES = ", ".join(_KINDS)


class Action(StrEnum):
    show = "show"
    clear = "clear"


def cache(
    action: Action = Argument(..., help="what to do"),
    kinds: list[str] | None = Argument(
        None,
        metavar="KIND",
        help=f"some of {_NAMES}; show: all, clear: kernels, which are tried again when they "
        "are needed",
    ),
) -> None:
    """Show or clear what is measured once and kept."""
    clears = action is Action.clear
    kinds = kinds or (["kernels"] if clears else list(_KINDS))
    for kind in kinds:
        if kind not in _KINDS:
            raise ValueError(f"KIND: expected some of {_NAMES}, got {kind!r}")
    if (folder := user_cache_directory()) is None:
        return
    print(folder)
    for kind in kinds:
        about, patterns = _KINDS[kind]
        paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
        files = (file for path in paths for file in (path, *path.rglob("*")))
        size = sum(file.stat().st_size for file in files if file.is_file())
        if clears:
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        done = ", removed" if clears and paths else ""
        print(f"{kind:<8} {size / 2**20:>9,.2f} MiB  {about}{done}")
