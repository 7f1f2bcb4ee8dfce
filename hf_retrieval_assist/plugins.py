"""Everything outside the core that it may load: engines, extensions and tools, by kind and name.

The core names none of them elsewhere, so that each can be left out of an installation. Packages of
others offer theirs in the same kinds, as entry points of the group `hf_retrieval_assist.KIND`.

Kinds:
    engines: an :class:`~.verification.engine.Engine` each; the first that serves a device computes
        forwards there, those of other packages before ours.
    drafters: `() -> Drafter`, which every assistant has besides its own; idle in calls that it has
        nothing to say of.
    fallbacks: `() -> Drafter` for the name that a preset's `fallback=` takes.
    automatic: `() -> Drafter` that `fallback="auto"` has besides logit n-grams; idle in calls
        that it cannot draft for.
    heads: `(module or path) -> Drafter | None` for a model, a head or a head's folder that is given
        as a fallback.
    memories: `(url, keep_bytes) -> SharedOutputs` for URLs of a scheme.
    methods: `(original, model, assistant, args, kwargs) -> result`, what serves a method of
        `GenerationMixin` beside `generate`.
    parts: what one place of the core asks for by its name.
    names: what users import from the package's root.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]
_FOLDER = Path(__file__).parent

OURS: dict[str, dict[str, str]] = {
    "engines": {"cuda": "engines.cuda.engine:CudaEngine", "cpu": "engines.cpu.engine:CpuEngine"},
    "drafters": {"grammar": "extensions.structured.grammar:GrammarDrafter"},
    "fallbacks": {
        "mtp": "extensions.heads.mtp:MtpDrafter",
        "quantized_self": "engines.cpu.quantized_self:QuantizedSelf",
    },
    "automatic": {"quantized_self": "engines.cpu.quantized_self:automatic"},
    "heads": {"heads": "extensions.heads.fallbacks:drafter_of"},
    "memories": dict.fromkeys(("redis", "rediss", "unix"), "extensions.redis.stream:OutputStream"),
    "methods": {
        name: f"extensions.serving.methods:{name}"
        for name in (
            "generate_batch",
            "continuous_batching_context_manager",
            "init_continuous_batching",
        )
    },
    "parts": {
        "forms": "extensions.structured.forms:expected_forms",
        "record": "extensions.record:Record",
        "recorded_layers": "extensions.heads.recorded_layers:RecordedLayers",
    },
    "names": {
        "EagleHead": "extensions.heads.eagle:EagleHead",
        "QuantizedSelf": "engines.cpu.quantized_self:QuantizedSelf",
        "reroute": "engines.cpu.reroute:reroute",
        "suggest": "tools.suggestion:suggest",
    },
}
"""Kind -> name -> `module:attribute` below the package of all that it can have of its own."""


@cache
def ours(kind: str) -> dict[str, str]:
    """Name -> `module:attribute` of what this installation has of our own, without importing it."""
    return {
        name: f"{_PACKAGE}.{path}"
        for name, path in OURS[kind].items()
        if _is_here(_FOLDER / path.partition(":")[0].replace(".", "/"))
    }


def _is_here(module: Path) -> bool:
    return module.with_suffix(".py").exists() or (module / "__init__.py").exists()


@cache
def paths(kind: str) -> dict[str, str]:
    """The same of all that is installed, that of other packages first; names of ours stay ours."""
    theirs = {one.name: one.value for one in entry_points(group=f"{_PACKAGE}.{kind}")}
    return {name: path for name, path in theirs.items() if name not in OURS[kind]} | ours(kind)


def load(kind: str, name: str) -> Any:
    """What a name of a kind stands for.

    Raises:
        ImportError: nothing of that name is installed.
    """
    path = paths(kind).get(name)
    if path is None:
        raise ImportError(
            f"{name}: expected one of {sorted(paths(kind))} among the installed {kind} of "
            f"{_PACKAGE}; install it whole, or leave out what asks for it"
        )
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def every(kind: str) -> Iterator[Any]:
    """All that is installed of a kind, in order."""
    return (load(kind, name) for name in paths(kind))
