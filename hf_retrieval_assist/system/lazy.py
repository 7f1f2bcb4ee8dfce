"""Attributes computed when first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801
    """`functools.cached_property` without a lock, which that of Python before 3.12 holds.

    One lock serves every instance there: threads wait for each other, and a fork while one of them
    computes leaves a child that waits for ever. Here two threads may both compute the value, which
    must be the same.
    """

    def __init__(self, compute: Callable[[Any], T]):
        super().__init__(compute)
        self.lock = nullcontext()
