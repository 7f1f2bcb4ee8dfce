"""Lossless retrieval-based speculative decoding inside Hugging Face `generate`.

Importing the package gives `model.generate` its `assistant=` keyword; :func:`uninstall` takes it
back.
"""

__version__ = "0.1.0"

from .assistants import Assistant
from .attachment import attach, detach
from .candidate_generator import RetrievalCandidateGenerator
from .corpus.datastore import Datastore
from .eagle.head import EagleHead
from .hook import install, uninstall
from .memory.output_memory import OutputMemory
from .presets import RestAssistant, SamAssistant, SequoiaAssistant, SuffixAssistant
from .record import Record
from .record.suggest import suggest
from .simulation import SimulationReport, simulate
from .token_tree import TokenTree

__all__ = [
    "Assistant",
    "Datastore",
    "EagleHead",
    "OutputMemory",
    "Record",
    "RestAssistant",
    "RetrievalCandidateGenerator",
    "SamAssistant",
    "SequoiaAssistant",
    "SimulationReport",
    "SuffixAssistant",
    "TokenTree",
    "attach",
    "detach",
    "install",
    "simulate",
    "suggest",
    "uninstall",
]

install()
