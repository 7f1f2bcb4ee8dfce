"""Where the results of a program's operators lie.

A forward that is recorded makes a tensor for every result, since nobody knows yet who reads it. A
program knows: memory whose last reader has run is given to later results, so that it needs little
of it, which stays in the caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from ...system.tensors import memory_of


class Noted(NamedTuple):
    """An operator of a forward.

    Attributes:
        make: makes of the following two, wherever they lie, what computes it anew.
        given: its arguments, among them the tensors that it reads or writes to.
        results: the tensors that it makes.
    """

    make: Callable[..., Any]
    given: Sequence[Any]
    results: Sequence[torch.Tensor] = ()


class Results:
    """Memory for what operators make, in which no two results lie that are needed at one time.

    Args:
        noted: the operators in their order.
        made: a tensor by the address of each memory that they have made.
        kept: what is read when all of them have run.

    Attributes:
        nbytes: of the memory.
    """

    def __init__(
        self, noted: Sequence[Noted], made: Mapping[int, torch.Tensor], kept: Sequence[Any]
    ) -> None:
        self._noted, self.nbytes, known = noted, 0, made.keys() - {0}
        self._places: dict[int, torch.UntypedStorage] = {}
        # The first operator and the last that touch each memory; in the order of the first.
        spans: dict[int, tuple[int, int]] = {}
        for i, touched in enumerate([*noted, kept]):
            tensors = [x for x in tree_iter(touched) if isinstance(x, torch.Tensor)]
            for memory in {*map(memory_of, tensors)} & known:
                spans[memory] = spans.get(memory, (i,))[0], i
        free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        taken: list[tuple[int, int]] = []
        for memory, (first, last) in spans.items():
            while taken and taken[0][0] < first:
                left = self._places[heappop(taken)[1]]
                free[left.nbytes()].append(left)
            nbytes = made[memory].untyped_storage().nbytes()
            if not free[nbytes]:
                free[nbytes].append(torch.UntypedStorage(nbytes))
                self.nbytes += nbytes
            self._places[memory] = free[nbytes].pop()
            heappush(taken, (last, memory))

    def operators(self) -> Iterator[Any]:
        """What computes the operators anew in this memory."""
        for one in self._noted:
            yield one.make(*self.moved(one.given), *self.moved(one.results))

    def moved(self, part: Any) -> Any:
        """A tensor, or what holds some, with all that was made where it lies from now on."""
        if isinstance(part, torch.Tensor):
            place = self._places.get(memory_of(part))
            if place is None:
                return part
            like = torch.empty(0, dtype=part.dtype)
            return like.set_(place, part.storage_offset(), part.shape, part.stride())
        if type(part) in (list, tuple):
            return type(part)(map(self.moved, part))
        if type(part) is dict:
            return {name: self.moved(x) for name, x in part.items()}
        return part
