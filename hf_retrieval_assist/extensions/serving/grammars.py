"""Compiles grammars. A schema of a few characters can take hours or all memory, and nothing ends a
compiler but the end of its process: each grammar is first compiled in one of its own.

This file is that process's program, too, which is why it imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from threading import Timer
from typing import Any, TextIO

SECONDS = 10.0  # that a grammar may take
_STARTING = 300.0  # seconds in which the process starts, on a machine that is busy
_MOST_BYTES = 2 << 30  # the memory that it may take then
_KEPT = 16  # grammars
_PLACE = re.compile(r"\[[\d:]+\] \S+: ")  # a place in xgrammar's code, before its messages

# Texts around JSON of a schema: what stands before it, the schema, and what stands behind it.
Form = tuple[str, str, str]


class Grammars:
    """Compiles grammars for one tokenizer. One thread at a time.

    Args:
        info: xgrammar's `TokenizerInfo`.
    """

    def __init__(self, info: Any) -> None:
        self._info, self._compiler = info, _compiler(info)
        self._process: Any = None
        self.compiled = lru_cache(_KEPT)(self._compile)

    def _compile(self, forms: tuple[Form, ...], tenant: str | None) -> Any:
        """The grammar of a text of one of several forms, as xgrammar has it compiled; for each
        tenant, to whom no time tells what others have asked for.

        Raises:
            ValueError: no grammar can be made of it, or none in time.
        """
        if self._process is None:
            self._process = _started()
            if self._ask(self._info.serialize_json(), _STARTING) is None:
                raise OSError("the process that compiles grammars did not start")
        said = self._ask(forms, SECONDS)
        if said is None:
            said = f"expected a schema that is compiled within {SECONDS:g} s and a few gigabytes"
        if said:
            raise ValueError(said)
        return _compiled(self._compiler, forms)

    def _ask(self, question: Any, seconds: float) -> str | None:
        """What the process answers: why it has no grammar, or nothing; None where it does not
        answer in time, and has ended."""
        process = self._process
        timer = Timer(seconds, process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(question), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        finally:
            timer.cancel()
        if answer:
            return str(json.loads(answer))
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started() -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # xgrammar's warnings are for nobody, and a signal to the group is the server's affair.
    apart: dict[str, Any] = {"stderr": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-P", __file__], **pipes, **apart)


def _compiler(info: Any) -> Any:
    import xgrammar

    # Answers are generated meanwhile.
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compiled(compiler: Any, forms: Any) -> Any:
    import xgrammar

    grammars = []
    for before, schema, after in forms:
        # One layout leaves less open, so that more is drafted.
        json_of = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)
        parts = [*_literal(before), json_of, *_literal(after)]
        grammars.append(xgrammar.Grammar.concat(*parts) if len(parts) > 1 else json_of)
    whole = grammars[0] if len(grammars) == 1 else xgrammar.Grammar.union(*grammars)
    return compiler.compile_grammar(whole)


def _literal(text: str) -> Iterator[Any]:
    """The grammar of a text; none of nothing."""
    import xgrammar

    if text:
        yield xgrammar.Grammar.from_ebnf(f"root ::= {json.dumps(text)}")


def _answers(questions: TextIO) -> Iterator[str]:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(next(questions)))
    compiler = _compiler(info)
    _bound_memory()
    yield ""
    for line in questions:
        try:
            matcher = xgrammar.GrammarMatcher(_compiled(compiler, json.loads(line)))
            # The first step may take as long as the rest.
            mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
            matcher.fill_next_token_bitmask(mask)
            yield ""
        except (RuntimeError, ValueError) as error:
            yield _PLACE.sub("", str(error)).strip()


def _bound_memory() -> None:
    with suppress(ImportError, OSError):
        import resource

        with open("/proc/self/statm") as sizes:
            taken = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST_BYTES,) * 2)


def main() -> None:
    """Answer each question of the input by a line: why it has no grammar, or nothing."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for answer in _answers(sys.stdin):
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main()
