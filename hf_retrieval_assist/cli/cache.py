"""The command `hf-retrieval-assist cache`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from ..system.files import user_cache_directory
from .command import Command

# Kind -> (what it is, names in the package's folder of the user's cache directory).
_KINDS = {
    "kernels": ("which kernels are fastest on this machine", ("*_tuning.json",)),
    "timings": ("what forwards cost, by model", ("cost",)),
    # What a conversion that was killed has left is among them.
    "model": ("the demo's models, unpacked", ("gemma-*", "smollm2-*", "unpacking-*")),
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "clear"), help="what to do")
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help=f"some of {', '.join(_KINDS)}; show: all, clear: kernels and timings, which are "
        "measured again when they are needed",
    )


def _run(args: argparse.Namespace) -> None:
    """Show what is kept in the user's cache directory, or remove some of it."""
    for kind in args.kinds:
        if kind not in _KINDS:
            raise ValueError(f"KIND: expected some of {', '.join(_KINDS)}, got {kind!r}")
    usual = ["kernels", "timings"] if args.action == "clear" else list(_KINDS)
    folder = user_cache_directory()
    print(folder)
    for kind in args.kinds or usual:
        about, patterns = _KINDS[kind]
        paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
        size = sum(_size(path) for path in paths)
        if args.action == "clear":
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        done = ", removed" if args.action == "clear" and paths else ""
        print(f"{kind:<8} {size / 2**20:>9,.2f} MiB  {about}{done}")


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


COMMAND = Command("show or clear what is measured once and kept", _add_arguments, _run)
