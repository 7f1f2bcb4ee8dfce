"""Structured output and tool calls: are outputs plain's, who raises, and how many tokens a forward.

The same prompts, schemas and library under plain `generate`, transformers' prompt lookup and an
assistant; what a grammar's drafts add to retrieval; and first calls of tools. Figures but the
seconds are counts. What needs a library that is not installed is left out and named
(`make test-structured` has all three).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.tools.demo_model import prompt_inputs

from .inputs import dtype_name, load
from .methods import Method, Run, assisted, baselines, run_method, tokens_per_forward
from .report import Report, Table
from .schemas import SIZES, schemas
from .simulation import simulate
from .tool_calls import CALLS, FORMATS, TOOLS, recorded

Make = Callable[[], LogitsProcessor]
"""A processor for one call."""

CALL_COLUMNS = {
    "library": "library",
    "decoding": "decoding",
    "method": "method",
    "calls": "calls",
    "equal": "plain's tokens",
    "raised": "raised",
    "per_forward": "tokens/forward",
    "seconds": "s",
}
SCHEMA_COLUMNS = {
    "dtype": "dtype",
    "size": "schemas",
    "method": "method",
    "calls": "calls",
    "equal": "plain's tokens",
    "tokens": "tokens",
    "per_forward": "tokens/forward",
    "seconds": "s",
}
TOOL_COLUMNS = {
    "format": "format",
    "calls": "calls",
    "tokens": "tokens",
    "without": "tokens/forward, retrieval",
    "with": "tokens/forward, tools=",
}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "seeded": {"do_sample": True},
}


class Hidden(LogitsProcessor):
    """A processor whose grammar nobody finds."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        return self._processor(input_ids, scores)


def libraries(model: Any, tokenizer: Any) -> Iterator[tuple[str, Callable[[Any], Make]]]:
    """What makes processors of schemas, for each library that is installed."""
    if find_spec("xgrammar") is not None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=model.config.vocab_size
        )
        compiler = xgrammar.GrammarCompiler(info)

        def by_xgrammar(schema: Any) -> Make:
            grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
            return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)

        yield "xgrammar", by_xgrammar
    if find_spec("outlines") is not None:
        import outlines
        from outlines.backends import llguidance, outlines_core

        both = {
            "llguidance": llguidance.LLGuidanceBackend,
            "outlines-core": outlines_core.OutlinesCoreBackend,
        }
        for name, backend_class in both.items():
            backend = backend_class(outlines.from_transformers(model, tokenizer))

            def by_outlines(schema: Any, backend: Any = backend) -> Make:
                processor = backend.get_json_schema_logits_processor(json.dumps(schema))

                def again() -> LogitsProcessor:
                    processor.reset()
                    return processor

                return again

            yield name, by_outlines


def run_constrained(
    method: Method, model: Any, inputs: dict[str, Any], make: Make, seed: int, **options: Any
) -> Run | Exception:
    """One call under a constraint, or what it raised."""
    torch.manual_seed(seed)
    try:
        return run_method(
            method, model, inputs, logits_processor=LogitsProcessorList([make()]), **options
        )
    except Exception as error:
        return error


def summary(found: Sequence[Run | Exception], plain: Sequence[Run | Exception]) -> dict[str, Any]:
    """Figures of one method over all calls, beside plain's of the same calls."""
    raised = [type(one).__name__ for one in found if isinstance(one, Exception)]
    runs = [one for one in found if isinstance(one, Run)]
    pairs = zip(found, plain, strict=True)
    equal = sum(
        isinstance(one, Run) and isinstance(other, Run) and torch.equal(one.ids, other.ids)
        for one, other in pairs
    )
    return {
        "calls": len(found),
        "equal": f"{equal} of {len(found)}",
        "raised": f"{len(raised)} ({', '.join(sorted(set(raised)))})" if raised else "0",
        "tokens": sum(run.tokens for run in runs),
        "per_forward": tokens_per_forward(runs) if runs else None,
        "seconds": sum(run.seconds for run in runs),
    }


def fill(
    table: Table,
    methods: Sequence[Method],
    makers: Sequence[Callable[[Make], Make]],
    calls: Sequence[tuple[dict[str, Any], Make]],
    model: Any,
    options: dict[str, Any],
    **labels: Any,
) -> None:
    """A row for each method, over the same calls; the first one is plain.

    The first call is made twice, since an assistant tests the model before it serves it first.
    """
    found: dict[str, list[Run | Exception]] = defaultdict(list)
    for method, maker in zip(methods, makers, strict=True):
        run_constrained(method, model, calls[0][0], maker(calls[0][1]), 0, **options)
    for number, (inputs, make) in enumerate(calls):
        for method, maker in zip(methods, makers, strict=True):
            one = run_constrained(method, model, inputs, maker(make), number, **options)
            found[method.name].append(one)
    for name, runs in found.items():
        figures = summary(runs, found["plain"])
        figures = {key: value for key, value in figures.items() if key in table.columns}
        table.add(method=name, **labels, **figures)


def same_calls(
    report: Report,
    model: Any,
    tokenizer: Any,
    known: Mapping[str, Callable[[Any], Make]],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """Plain, prompt lookup and an assistant, library by library."""
    table = report.table("The same calls by three methods", CALL_COLUMNS)
    methods = [*baselines(), assisted("SamAssistant", _assistant_of(arguments))]
    asked = list(schemas("small", 1 if arguments.quick else arguments.calls_each, arguments.seed))
    for missing in {"xgrammar", "llguidance", "outlines-core"} - known.keys():
        report.note(f"{missing} is not installed")
    for library, compiled in known.items():
        progress(f"{library}: compiling")
        calls = [
            (dict(prompt_inputs(tokenizer, one.prompt)), compiled(one.schema)) for one in asked
        ]
        for decoding, options in DECODING.items():
            progress(f"{library}, {decoding}")
            options = options | {"max_new_tokens": arguments.structured_tokens}
            same = [lambda make: make] * len(methods)
            labels = {"library": library, "decoding": decoding}
            fill(table, methods, same, calls, model, options, **labels)


def sizes(
    report: Report,
    model: Any,
    tokenizer: Any,
    known: Mapping[str, Callable[[Any], Make]],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """What drafts from the grammar add to those of retrieval, by the size of the schema."""
    table = report.table("Schemas of three sizes, xgrammar", SCHEMA_COLUMNS)
    if "xgrammar" not in known:
        return
    make = _assistant_of(arguments)
    methods = [Method("plain", dict), assisted("retrieval", make), assisted("with grammar", make)]
    makers = [lambda make: make, lambda make: lambda: Hidden(make()), lambda make: make]
    options = {"do_sample": False, "max_new_tokens": arguments.structured_tokens}
    for size in SIZES:
        progress(f"{size} schemas")
        asked = schemas(size, 1 if arguments.quick else arguments.schemas_each, arguments.seed)
        calls = [
            (dict(prompt_inputs(tokenizer, one.prompt)), known["xgrammar"](one.schema))
            for one in asked
        ]
        labels = {"size": size, "dtype": dtype_name(model)}
        fill(table, methods, makers, calls, model, options, **labels)


def first_calls(
    report: Report,
    tokenizer: Any,
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """Recorded calls of tools that nothing was said of before; a perfect verifier, no model."""
    table = report.table("First calls of twelve tools", TOOL_COLUMNS)
    make = _assistant_of(arguments)
    for name, template in FORMATS.items():
        progress(f"tool calls of {name}")
        tokenizer.chat_template = template
        expecting = make().expecting(tools=TOOLS, tokenizer=tokenizer).expected
        calls = CALLS[: 2 if arguments.quick else None]
        requests = [recorded(tokenizer, template, call) for call in calls]
        figures = {}
        for column in ("without", "with"):
            found = []
            for request in requests:
                assistant = make()
                if column == "with":
                    assistant.policy.expected = expecting
                found.append(simulate(assistant, [request]))
            tokens = sum(one.tokens for one in found)
            figures[column] = tokens / sum(one.steps for one in found)
        table.add(format=name, calls=len(calls), tokens=tokens, **figures)


def _assistant_of(arguments: argparse.Namespace) -> Callable[[], Assistant]:
    return lambda: SamAssistant(budget=arguments.structured_nodes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemas-each", type=int, default=20, help="of each size")
    parser.add_argument("--calls-each", type=int, default=4, help="of each library")
    parser.add_argument("--structured-tokens", type=int, default=48, help="new, at most")
    parser.add_argument("--structured-nodes", type=int, default=16, help="verified at most")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    names = ("model", "calls_each", "schemas_each", "structured_tokens", "structured_nodes", "seed")
    report = Report("structured", {name: getattr(arguments, name) for name in names})
    progress("loading the model")
    measure(report, *load(arguments), arguments, progress)
    return report


def measure(
    report: Report,
    model: Any,
    tokenizer: Any,
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """All tables."""
    progress("reading the vocabulary")
    known = dict(libraries(model, tokenizer))
    same_calls(report, model, tokenizer, known, arguments, progress)
    sizes(report, model, tokenizer, known, arguments, progress)
    # Last, since it gives the tokenizer other chat templates.
    first_calls(report, tokenizer, arguments, progress)
