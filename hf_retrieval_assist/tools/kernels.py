"""The kernels of this installation."""

from __future__ import annotations

from collections.abc import Sequence

from ..plugins import paths


def kernel_paths() -> Sequence[str]:
    """What the kernels for few rows are compiled for that the CPU has."""
    if "cpu" not in paths("engines"):
        return ()
    from ..engines.cpu.skinny import PATHS

    return PATHS
