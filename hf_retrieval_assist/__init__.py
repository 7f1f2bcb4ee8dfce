"""Lossless retrieval-based speculative decoding inside Hugging Face `generate`.

The first use of a name below gives `model.generate` its `assistant=` keyword; :func:`uninstall`
takes it back. Until then nothing of transformers is imported or touched, so that other engines can
use what drafts and remembers, each from its module.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .system.versions import require_compiled, require_supported_versions

if TYPE_CHECKING:
    from .assistants import Assistant
    from .attachment import attach, detach
    from .candidate_generator import RetrievalCandidateGenerator
    from .corpus.datastore import Datastore
    from .draft_models.eagle_head import EagleHead
    from .draft_models.early_exit import EarlyExit
    from .draft_models.quantized_self import QuantizedSelf
    from .drafters.base import Drafter, DraftSession
    from .hook import install, uninstall
    from .kernels.reroute import reroute
    from .memory.output_memory import OutputMemory
    from .planning.cost_store import CostModels
    from .presets import (
        RestAssistant,
        RolloutAssistant,
        SamAssistant,
        SequoiaAssistant,
        SuffixAssistant,
    )
    from .record.record import Record
    from .simulation import SimulationReport, simulate
    from .suggestion import suggest
    from .token_tree import TokenTree

require_compiled()

__version__ = "0.2.0"

__all__ = [
    "Assistant",
    "CostModels",
    "Datastore",
    "DraftSession",
    "Drafter",
    "EagleHead",
    "EarlyExit",
    "OutputMemory",
    "QuantizedSelf",
    "Record",
    "RestAssistant",
    "RetrievalCandidateGenerator",
    "RolloutAssistant",
    "SamAssistant",
    "SequoiaAssistant",
    "SimulationReport",
    "SuffixAssistant",
    "TokenTree",
    "attach",
    "detach",
    "install",
    "reroute",
    "simulate",
    "suggest",
    "uninstall",
]

_MODULES = {
    "Assistant": "assistants",
    "CostModels": "planning.cost_store",
    "Datastore": "corpus.datastore",
    "DraftSession": "drafters.base",
    "Drafter": "drafters.base",
    "EagleHead": "draft_models.eagle_head",
    "EarlyExit": "draft_models.early_exit",
    "OutputMemory": "memory.output_memory",
    "QuantizedSelf": "draft_models.quantized_self",
    "Record": "record.record",
    "RestAssistant": "presets",
    "RetrievalCandidateGenerator": "candidate_generator",
    "RolloutAssistant": "presets",
    "SamAssistant": "presets",
    "SequoiaAssistant": "presets",
    "SimulationReport": "simulation",
    "SuffixAssistant": "presets",
    "TokenTree": "token_tree",
    "attach": "attachment",
    "detach": "attachment",
    "install": "hook",
    "reroute": "kernels.reroute",
    "simulate": "simulation",
    "suggest": "suggestion",
    "uninstall": "hook",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    give_generate_its_keyword()
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


@functools.cache
def give_generate_its_keyword() -> None:
    """Once, so that it stays away after `uninstall`."""
    require_supported_versions()
    import_module(".hook", __name__).install()
