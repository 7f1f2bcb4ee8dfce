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
    from .cache.prefixes import Prefixes as Prefixes
    from .candidate_generator import RetrievalCandidateGenerator as RetrievalCandidateGenerator
    from .corpus.datastore import Datastore as Datastore
    from .drafters.base import Drafter as Drafter
    from .drafters.base import DraftSession as DraftSession
    from .engines.cpu.quantized_self import QuantizedSelf as QuantizedSelf
    from .engines.cpu.reroute import reroute as reroute
    from .extensions.heads.eagle import EagleHead as EagleHead
    from .hook import install as install
    from .hook import uninstall as uninstall
    from .memory.output_memory import OutputMemory as OutputMemory
    from .presets import SamAssistant as SamAssistant
    from .tools.suggestion import suggest as suggest
    from .types.evidence import EvidenceClasses as EvidenceClasses
    from .types.token_tree import TokenTree as TokenTree
    from .verification.engine import release_memory as release_memory

require_compiled()

__version__ = "0.2.0"

_NAMES = {
    "assistants": "Assistant",
    "attachment": "attach detach",
    "candidate_generator": "RetrievalCandidateGenerator",
    "cache.prefixes": "Prefixes",
    "corpus.datastore": "Datastore",
    "drafters.base": "DraftSession Drafter",
    "hook": "install uninstall",
    "memory.output_memory": "OutputMemory",
    "types.evidence": "EvidenceClasses",
    "presets": "SamAssistant",
    "types.token_tree": "TokenTree",
    "verification.engine": "release_memory",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, *ours("names")])

# What to write for names of version 0.2 and before.
_GONE = {
    "SuffixAssistant": "SamAssistant(memory=OutputMemory())",
    "RolloutAssistant": "SamAssistant(memory=OutputMemory(by_prompt=True, half_life=16))",
    "RestAssistant": (
        "SamAssistant(corpus=datastore), or hf_retrieval_assist.papers.Rest(datastore)"
    ),
    "SequoiaAssistant": (
        "SamAssistant(fallback=draft_model), or hf_retrieval_assist.papers.Sequoia(draft_model)"
    ),
    "EarlyExit": "model.generate(..., assistant_early_exit=layer), which transformers has",
    "CostModels": "from hf_retrieval_assist.policy.cost_store import CostModels",
    "NamedIds": "from hf_retrieval_assist.types.token_tree import NamedIds",
    "Record": "from hf_retrieval_assist.extensions.record import Record",
    "SimulationReport": "from benchmarks.simulation import SimulationReport, in the repository",
    "simulate": "from benchmarks.simulation import simulate, in the repository",
}


def __getattr__(name: str) -> Any:
    if name in _GONE:
        # No AttributeError, of which `from ... import` would tell no more than the name.
        raise ImportError(f"{name} is gone from {__name__}; write {_GONE[name]}", name=name)
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
