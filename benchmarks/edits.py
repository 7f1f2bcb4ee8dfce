"""Tokens per forward while a file is written anew with a change in it, as editors and agents ask.

Files of Python's library are changed as commits change files. A perfect verifier stands in for the
model, so that the figures are counts; they depend on the release of Python whose files these are.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_retrieval_assist import Assistant, SamAssistant

from .baselines import prompt_lookup
from .inputs import load, model_name
from .report import Report
from .simulation import simulate

# Files that a model writes in one answer, in characters.
SHORTEST, LONGEST = 1500, 9000

COLUMNS = {
    "kind": "change",
    "prompt": "prompt",
    "method": "method",
    "files": "files",
    "tokens": "tokens",
    "per_forward": "tokens/forward",
    "nodes": "nodes/forward",
}

Source = list[str]
"""The lines of a file."""


@dataclass(frozen=True)
class Edit:
    """A file before and after a change, and the change in words."""

    wish: str
    before: str
    after: str


def functions(lines: Source) -> list[ast.FunctionDef]:
    """A file's functions and methods, nested ones included, in order."""
    nodes = ast.walk(ast.parse("".join(lines)))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return sorted(found, key=lambda function: function.lineno)


def extent(function: ast.FunctionDef, lines: Source) -> slice:
    """Its lines, decorators and the empty lines below included."""
    start = min(part.lineno for part in (function, *function.decorator_list)) - 1
    end = function.end_lineno or start
    while end < len(lines) and not lines[end].strip():
        end += 1
    return slice(start, end)


def rename(lines: Source, rng: random.Random) -> tuple[str, Source]:
    name = rng.choice([f.name for f in functions(lines) if not f.name.startswith("_")])
    new = f"{name}_checked"
    text = re.sub(rf"\b{name}\b", new, "".join(lines))
    return f"Rename {name} to {new} everywhere.", text.splitlines(keepends=True)


def annotate(lines: Source, rng: random.Random) -> tuple[str, Source]:
    signature = re.compile(r"^(\s*def .*\)):$", re.MULTILINE)
    text = signature.sub(r"\1 -> Any:", "".join(lines))
    return "Annotate what functions return.", ["from typing import Any\n", *text.splitlines(True)]


def guard(lines: Source, rng: random.Random) -> tuple[str, Source]:
    """A check at the beginning of one function, below its documentation."""
    function = rng.choice([f for f in functions(lines) if len(f.body) > 1 and f.args.args])
    name, body = function.args.args[-1].arg, function.body[1]
    indent, at = " " * body.col_offset, body.lineno - 1
    check = [
        f"{indent}if {name} is None:\n",
        f'{indent}    raise ValueError("{function.name}: expected {name}, got None")\n',
    ]
    return f"Let {function.name} refuse None as {name}.", [*lines[:at], *check, *lines[at:]]


def remove(lines: Source, rng: random.Random) -> tuple[str, Source]:
    function = rng.choice(functions(lines))
    taken = extent(function, lines)
    return f"Remove {function.name}.", [*lines[: taken.start], *lines[taken.stop :]]


def move(lines: Source, rng: random.Random) -> tuple[str, Source]:
    """One function to the end of the file."""
    function = rng.choice([f for f in functions(lines) if f.col_offset == 0])
    taken = extent(function, lines)
    left = [*lines[: taken.start], *lines[taken.stop :]]
    return f"Move {function.name} to the end.", [*left, "\n", "\n", *lines[taken]]


def repair(lines: Source, rng: random.Random) -> tuple[str, Source]:
    """Another comparison or number in one line."""
    swaps = {" == ": " != ", " < ": " <= ", " > ": " >= ", " is None": " is not None", " 1": " 2"}
    places = [(n, old) for n, line in enumerate(lines) for old in swaps if old in line]
    at, old = rng.choice(places)
    changed = lines[at].replace(old, swaps[old], 1)
    return f"Mend line {at + 1}.", [*lines[:at], changed, *lines[at + 1 :]]


KINDS: dict[str, Callable[[Source, random.Random], tuple[str, Source]]] = {
    "one line": repair,
    "a check added": guard,
    "a name changed": rename,
    "returns annotated": annotate,
    "a function removed": remove,
    "a function moved": move,
}


def library_files() -> list[Path]:
    """Modules of Python's library of a size that a model writes in one answer."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(folder.glob("*.py"))
        if SHORTEST <= path.stat().st_size <= LONGEST and not path.stem.startswith("_")
    ]


def edits(kind: str, files: Sequence[Path], count: int, seed: int) -> Iterator[Edit]:
    """Changes of one kind, of files in an order of its own, one of each file that allows it."""
    rng = random.Random(f"{kind} {seed}")
    for path in rng.sample(files, len(files)):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        try:
            wish, changed = KINDS[kind](lines, rng)
        except IndexError:  # nothing there to choose from
            continue
        before, after = "".join(lines), "".join(changed)
        if before == after:
            continue
        yield Edit(wish, before, after)
        count -= 1
        if not count:
            return


def methods(nodes: int) -> dict[str, Callable[[Edit, Callable[[str], list[int]]], Assistant]]:
    """What is compared, each made anew for every file."""
    return {
        "prompt lookup": lambda edit, encode: prompt_lookup(nodes),
        "SamAssistant": lambda edit, encode: SamAssistant(budget=nodes),
        "SamAssistant, expecting": lambda edit, encode: SamAssistant(budget=nodes).expecting(
            encode(edit.before)
        ),
    }


PROMPTS: dict[str, Callable[[Edit], str]] = {
    "wish and file": lambda edit: f"{edit.wish}\n\n{edit.before}\n\nThe file after that:\n\n",
    "wish alone": lambda edit: f"{edit.wish}\n\nThe file after that:\n\n",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--edit-files", type=int, default=8, help="of each kind of change")
    parser.add_argument("--edit-nodes", type=int, default=60, help="verified at most")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the tokenizer")
    _, tokenizer = load(arguments)
    return measure(partial(encoded, tokenizer), library_files(), arguments, progress)


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def measure(
    encode: Callable[[str], list[int]],
    files: Sequence[Path],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> Report:
    """Every kind of change under every prompt, by every method."""
    nodes, count = arguments.edit_nodes, 1 if arguments.quick else arguments.edit_files
    settings = {"tokenizer": model_name(arguments), "nodes": nodes, "files": count}
    report = Report("edits", settings | {"seed": arguments.seed})
    table = report.table("Files written anew", COLUMNS)
    for kind in KINDS:
        chosen = list(edits(kind, files, count, arguments.seed))
        for prompt, ask in PROMPTS.items():
            requests = [(encode(ask(edit)), encode(edit.after)) for edit in chosen]
            for name, make in methods(nodes).items():
                progress(f"{kind}, {prompt}: {name}")
                found = [
                    simulate(make(edit, encode), [request])
                    for edit, request in zip(chosen, requests, strict=True)
                ]
                tokens, steps = (sum(getattr(f, key) for f in found) for key in ("tokens", "steps"))
                table.add(
                    kind=kind,
                    prompt=prompt,
                    method=name,
                    files=len(chosen),
                    tokens=tokens,
                    per_forward=tokens / steps,
                    nodes=sum(f.nodes for f in found) / steps,
                )
    return report
