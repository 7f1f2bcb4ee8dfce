"""How often a caller has said that a model was changed in a way that nothing counts.

Whatever is kept of models is kept with the number that stood here when it was found out.
"""

from __future__ import annotations

_said = 0


def said() -> int:
    """How often it was said in this process."""
    return _said


def say() -> None:
    """Let nothing count any more that was found out before."""
    global _said
    _said += 1
