"""The package's log: a branch of transformers' own, so that it shows without set-up.

`transformers.logging.set_verbosity_info()`, `TRANSFORMERS_VERBOSITY` and the like govern both.
"""

from __future__ import annotations

from typing import Any

from transformers.utils import logging


def get_logger(name: str) -> Any:
    """The logger of a module, with transformers' `warning_once` beside the usual methods."""
    return logging.get_logger(f"transformers.{name}")
