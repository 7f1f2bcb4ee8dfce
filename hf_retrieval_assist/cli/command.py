"""What a subcommand is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: one line for `--help`.
        add_arguments: declares its arguments.
        run: does the work; raises ValueError, TypeError, OSError or ImportError where it cannot.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
