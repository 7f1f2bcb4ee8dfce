"""Lossless retrieval-based speculative decoding inside Hugging Face `generate`.

Importing the package gives `model.generate` its `assistant=` keyword; :func:`uninstall` takes it
back.
"""

__version__ = "0.1.0"

from .assistants import Assistant
from .hook import install, uninstall
from .presets import SamAssistant
from .simulation import SimulationReport, simulate
from .token_tree import TokenTree

__all__ = [
    "Assistant",
    "SamAssistant",
    "SimulationReport",
    "TokenTree",
    "install",
    "simulate",
    "uninstall",
]

install()
