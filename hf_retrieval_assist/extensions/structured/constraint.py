"""What a grammar leaves open: the matcher of a call's logits processor, followed beside it.

A processor of xgrammar, llguidance or outlines lets a model write only what its grammar allows. A
drafter follows the same grammar by a matcher of its own, so that the caller's processor is called
exactly as plain decoding calls it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ...types.token_tree import TokenTree

DEEPEST = 512  # tokens that a matcher can take back

# The module that follows the matchers of each library.
_LIBRARIES = ("xgrammar", "llguidance", "outlines_core")


class Constraint(ABC):
    """A grammar's state behind one text, which starts at the prompt's end."""

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Go on by a token; False, and nothing has changed, where the grammar forbids it."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, at most DEEPEST."""

    @abstractmethod
    def forced(self, limit: int) -> list[list[int]]:
        """The tokens that have to follow, `limit` at most, cut as a tokenizer would cut them.

        Each comes with the others that a model may write in its place, the longest first, since the
        same text can be cut otherwise. Fewer than `limit` reach to the end of what is forced.
        """

    def prune(self, tree: TokenTree) -> TokenTree:
        """The nodes of `tree` that the grammar allows, at most DEEPEST deep."""
        tree = tree.cut_depth(DEEPEST)
        tokens, depths = tree.token_ids.tolist(), tree.depths.tolist()
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):
            children.setdefault(parent, []).append(node)
        legal: list[int] = []
        depth = 0  # the node's behind which the grammar stands
        waiting = children.get(-1, [])[::-1]
        while waiting:
            node = waiting.pop()
            self.rollback(depth + 1 - depths[node])
            depth = depths[node] - 1
            if self.advance(tokens[node]):
                depth += 1
                legal.append(node)
                waiting += children.get(node, [])[::-1]
        self.rollback(depth)
        return tree if len(legal) == len(tree) else tree.select(np.array(sorted(legal), np.int32))


def constraint_of(processors: Sequence[Any], row: int) -> Constraint | None:
    """The constraint that a call's logits processors put on a row; None where there is none.

    Where several do, the first one counts. A library is looked at only where something else has
    imported it.
    """
    for library in _LIBRARIES:
        if library in sys.modules:
            found = import_module(f".{library}_matcher", __package__)
            for processor in processors:
                constraint: Constraint | None = found.constraint_of(processor, row)
                if constraint is not None:
                    return constraint
    return None
