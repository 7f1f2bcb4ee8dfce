"""Names of transformers that every assisted call counts on, and transformers does not promise.

A release is judged by looking for these names, and not by its number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from packaging.version import Version
from transformers import GenerationMixin, __version__

from ..system import versions
from ..system.log import get_logger

logger = get_logger(__name__)

# The releases under which the tests have run.
OLDEST, NEWEST = versions.OLDEST["transformers"], "5.24"

NEEDED = (
    *(
        f"transformers:GenerationMixin.{name}"
        for name in (
            *("_prefill", "_sample", "prepare_inputs_for_generation"),
            *("_update_model_kwargs_for_generation", "_has_unfinished_sequences"),
            *("_supports_default_dynamic_cache", "_valid_auto_compile_criteria"),
            "_optimize_model_for_decode",
        )
    ),
    "transformers:PreTrainedModel._is_stateful",
    "transformers:PreTrainedConfig._attn_implementation",
)
"""Names as "module:Class.name" or "module:name"."""


def absent(names: Iterable[str]) -> list[str]:
    """Those that this release of transformers lacks, with their classes."""
    return [name.partition(":")[2] for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return False
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def cache_parameter() -> str | None:
    """What `generate` calls the cache in a forward's keyword arguments; None: it is not found."""
    prepare: Any = GenerationMixin.prepare_inputs_for_generation
    parameters = inspect.signature(prepare).parameters.values()
    return next((p.name for p in parameters if "Cache" in str(p.annotation)), None)


@functools.cache
def why_plain() -> str | None:
    """Why no model can be assisted under this release of transformers; None: models can be.

    A release that nobody has tried is served, and said so once.
    """
    lacking = absent(NEEDED)
    if not lacking and cache_parameter() is None:
        lacking = ["a cache among what GenerationMixin.prepare_inputs_for_generation takes"]
    if lacking:
        return (
            f"every call of every model is decoded plainly under transformers {__version__} "
            f"(tested: {OLDEST} to {NEWEST}), which lacks what an assistant works with: "
            f"{', '.join(lacking)}"
        )
    if Version(__version__).release[:2] > Version(NEWEST).release:
        logger.warning(
            "transformers %s is newer than the releases that the assistant was tested with (%s to "
            "%s); each model still passes a test of its own before it is assisted",
            *(__version__, OLDEST, NEWEST),
        )
    return None
