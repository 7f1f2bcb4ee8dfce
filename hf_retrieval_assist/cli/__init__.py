"""The command line: `hf-retrieval-assist COMMAND ...`.

Exit codes: 0 done, 1 an error that is told in one line, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from . import cache, datastore, demo, serve, suggest

PROGRAM = "hf-retrieval-assist"

COMMANDS = {
    **datastore.COMMANDS,
    "cache": cache.COMMAND,
    "demo": demo.COMMAND,
    "serve": serve.COMMAND,
    "suggest": suggest.COMMAND,
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that names every default that is a value, unless the text does."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is None or action.default is False or "default" in (action.help or "")
        return action.help if told else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Retrieval-based speculative decoding for transformers."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.summary, description=command.summary, formatter_class=_Help
        )
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        COMMANDS[arguments.command].run(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0
