"""Lossless retrieval-based speculative decoding inside Hugging Face `generate`.

The first use of a name below gives `model.generate` its `assistant=` keyword; :func:`uninstall`
takes it back. Until then nothing of transformers is imported or touched, so that other engines can
use what drafts and remembers, each from its module.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .plugins import load, ours
from .system.versions import require_compiled, require_supported_versions

if TYPE_CHECKING:
    from .assistants import Assistant as Assistant
    from .attachment import attach as attach
    from .attachment import detach as detach
    from .candidate_generator import RetrievalCandidateGenerator as RetrievalCandidateGenerator
    from .corpus.datastore import Datastore as Datastore
    from .draft_models.draft_model import EarlyExit as EarlyExit
    from .drafters.base import Drafter as Drafter
    from .drafters.base import DraftSession as DraftSession
    from .engines.cpu.quantized_self import QuantizedSelf as QuantizedSelf
    from .engines.cpu.reroute import reroute as reroute
    from .extensions.heads.eagle import EagleHead as EagleHead
    from .extensions.record.record import Record as Record
    from .hook import install as install
    from .hook import uninstall as uninstall
    from .memory.output_memory import OutputMemory as OutputMemory
    from .policy.cost_store import CostModels as CostModels
    from .presets import RestAssistant as RestAssistant
    from .presets import RolloutAssistant as RolloutAssistant
    from .presets import SamAssistant as SamAssistant
    from .presets import SequoiaAssistant as SequoiaAssistant
    from .presets import SuffixAssistant as SuffixAssistant
    from .simulation import SimulationReport as SimulationReport
    from .simulation import simulate as simulate
    from .tools.suggestion import suggest as suggest
    from .types.evidence import EvidenceClasses as EvidenceClasses
    from .types.token_tree import NamedIds as NamedIds
    from .types.token_tree import TokenTree as TokenTree
    from .verification.engine import release_memory as release_memory

require_compiled()

__version__ = "0.2.0"

_NAMES = {
    "assistants": "Assistant",
    "attachment": "attach detach",
    "candidate_generator": "RetrievalCandidateGenerator",
    "corpus.datastore": "Datastore",
    "draft_models.draft_model": "EarlyExit",
    "drafters.base": "DraftSession Drafter",
    "hook": "install uninstall",
    "memory.output_memory": "OutputMemory",
    "types.evidence": "EvidenceClasses",
    "policy.cost_store": "CostModels",
    "presets": "RestAssistant RolloutAssistant SamAssistant SequoiaAssistant SuffixAssistant",
    "simulation": "SimulationReport simulate",
    "types.token_tree": "NamedIds TokenTree",
    "verification.engine": "release_memory",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, *ours("names")])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    give_generate_its_keyword()
    if name in _MODULES:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    else:
        value = load("names", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


@functools.cache
def give_generate_its_keyword() -> None:
    """Once, so that it stays away after `uninstall`."""
    require_supported_versions()
    import_module(".hook", __name__).install()
