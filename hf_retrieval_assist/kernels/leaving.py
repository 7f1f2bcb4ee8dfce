"""Leaving scopes that an exception has kept from ending."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .attention_scope import innermost, leave_to
from .reroute import go_to_depth
from .skinny import route_depth


@contextmanager
def all_scopes_left() -> Iterator[None]:
    """Scope at whose end the running thread is in the scopes of kernels that it was in before.

    Python may raise KeyboardInterrupt before the first line of a scope's `__exit__`. Such a scope
    would go on for ever, and later forwards of the thread would be taken for those inside of it.
    """
    depth, scope = route_depth(), innermost()
    try:
        yield
    finally:
        leave_to(scope)
        go_to_depth(depth)
