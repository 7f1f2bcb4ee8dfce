"""Leaving scopes that an exception has kept from ending."""

from __future__ import annotations

from .attention_scope import innermost, leave_to
from .reroute import go_to_depth
from .skinny import route_depth


class ScopeMark:
    """The scopes of kernels that the running thread is in at a moment.

    Python may raise KeyboardInterrupt before the first line of a scope's `__exit__`. Such a scope
    would go on for ever, and later forwards of the thread would be taken for those inside of it.
    """

    def __init__(self) -> None:
        self._depth = route_depth()
        self._scope = innermost()

    def leave_since(self) -> None:
        """Leave what this thread has entered since and not left."""
        leave_to(self._scope)
        go_to_depth(self._depth)
