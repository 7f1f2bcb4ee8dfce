"""The command line: `hf-retrieval-assist COMMAND ...`.

Exit codes: 0 done, 1 an error that is told in one line, 2 wrong usage, 130 interrupted, 143
terminated while a corpus was written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from ... import __version__
from . import datastore, doctor, models, serve

PROGRAM = "hf-retrieval-assist"


def _show_version(asked: bool) -> None:
    if asked:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _program(
    version: bool = typer.Option(False, "--version", callback=_show_version, help="show it"),
) -> None:
    """Retrieval-based speculative decoding for transformers."""


app = typer.Typer(callback=_program, add_completion=False, rich_markup_mode=None)
for _command in (*datastore.COMMANDS, *models.COMMANDS, doctor.doctor, serve.serve):
    app.command()(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    try:
        typer.main.get_command(app)(argv, PROGRAM)
    except SystemExit as end:
        return int(end.code or 0)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
