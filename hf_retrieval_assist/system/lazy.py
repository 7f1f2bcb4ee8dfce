"""Attributes computed when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801
    """`functools.cached_property` without a lock, which that of Python before 3.12 holds.

    One lock serves every instance there: threads wait for each other, and a fork while one of them
    computes leaves a child that waits for ever. Here two threads may both compute the value, which
    must be the same.
    """

    def __init__(self, compute: Callable[[Any], T]):
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # of the class, which only tools ask for
        value = self._compute(instance)
        # Found before this descriptor from now on; a frozen dataclass forbids setattr.
        instance.__dict__[self._name] = value
        return value
