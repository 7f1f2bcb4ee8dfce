"""What calls did, step by step: proposed by whom, verified, accepted, and how long it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...drafters.base import Drafter
from ...policy.stats import PHASES, CallStats
from ...system.lazy import cached_property
from ...types.row_text import Path
from ...types.token_tree import Int32Array, TokenTree

MODEL = "the model"  # credited with the token that every forward brings by itself


class Witness(NamedTuple):
    """A source that named a node.

    Attributes:
        origin: the source; see `Drafter.origins`.
        prob: its own estimate that the node is accepted.
    """

    origin: str
    prob: float


@dataclass(frozen=True, eq=False)
class Step:
    """What one forward did for one row.

    Attributes:
        row: of the batch.
        forward: number of the forward in its call; 0 is the prefill.
        position: tokens that the row had generated before.
        drafts: the calibrated proposal of each drafter.
        tree: what was verified of them.
        token_ids: int32 [k], the generated tokens, of which all but the last were accepted nodes,
            unless the text ended at a node.
        accepted: int32 [a], the accepted nodes of `tree`, from the root down.
        seconds: by phase, of the whole forward with all its rows; `prefill` alone for the prefill,
            and empty where transformers' own loop decoded.
        drafters: whose `drafts` they are.
    """

    row: int
    forward: int
    position: int
    drafts: tuple[TokenTree, ...]
    tree: TokenTree
    token_ids: Int32Array
    accepted: Int32Array
    seconds: dict[str, float]
    drafters: tuple[Drafter, ...] = field(repr=False, default=())

    @cached_property
    def witnesses(self) -> list[list[Witness]]:
        """The sources that named each verified node, the most confident first."""
        found: list[list[Witness]] = [[] for _ in range(len(self.tree))]
        for drafter, draft in zip(self.drafters, self.drafts, strict=True):
            names = [drafter.origins[i] for i in drafter.origins_of(draft.classes)]
            for node, place in enumerate(same_paths(self.tree, draft)):
                if place >= 0:
                    found[node].append(Witness(names[place], float(draft.probs[place])))
        # The sort is stable: of equals the earlier drafter, as in the merged tree.
        return [sorted(named, key=lambda witness: -witness.prob) for named in found]

    def credit(self, node: int) -> str:
        """The source whose estimate a node was verified on."""
        named = self.witnesses[node]
        return named[0].origin if named else MODEL

    @property
    def credits(self) -> list[str]:
        """The source of each generated token."""
        drafted = [self.credit(int(node)) for node in self.accepted[: len(self.token_ids)]]
        return drafted + [MODEL] * (len(self.token_ids) - len(drafted))

    @property
    def proposed(self) -> Counter[str]:
        """Proposed nodes by source; one that several name counts for each."""
        pairs = zip(self.drafters, self.drafts, strict=True)
        return Counter(d.origins[i] for d, draft in pairs for i in d.origins_of(draft.classes))

    def to_dict(self) -> dict[str, Any]:
        """The step in JSON's types; parents of −1 are the last token before the step."""
        tree = self.tree
        fields = ("token", "parent", "prob", "named_by")
        arrays = (array.tolist() for array in (tree.token_ids, tree.parents, tree.probs))
        nodes = zip(*arrays, map(dict, self.witnesses), strict=True)
        return {
            "row": self.row,
            "forward": self.forward,
            "position": self.position,
            "proposed": dict(self.proposed),
            "tree": [dict(zip(fields, node, strict=True)) for node in nodes],
            "accepted": self.accepted.tolist(),
            "tokens": self.token_ids.tolist(),
            "credits": self.credits,
            "seconds": self.seconds,
        }


def same_paths(tree: TokenTree, draft: TokenTree) -> list[int]:
    """The node of `draft` at the end of the same path as each node of `tree`, or −1."""
    edges = zip(draft.parents.tolist(), draft.token_ids.tolist(), strict=True)
    places = {edge: node for node, edge in enumerate(edges)}
    found: list[int] = []
    for parent, token in zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True):
        above = -1 if parent < 0 else found[parent]
        lost = parent >= 0 and above < 0
        found.append(-1 if lost else places.get((above, token), -1))
    return found


@dataclass(eq=False)
class CallRecord:
    """One call to `generate`.

    Attributes:
        prompts: int32 [length] for each row, without padding.
        stats: the call's figures.
        steps: in the order of their forwards, those of a batch's rows one after the other.
    """

    prompts: Sequence[Int32Array]
    stats: CallStats
    _drafters: tuple[Drafter, ...]
    _listeners: Sequence[Callable[[Step], None]]
    steps: list[Step] = field(default_factory=list)
    _end: int | None = None
    _forward: int = 0

    def __post_init__(self) -> None:
        self._lengths = [0] * len(self.prompts)
        self._seen = dict.fromkeys(self.stats.seconds, 0.0)

    def begin(self, paths: Sequence[Path]) -> None:
        """The prefill brought the first tokens of each row."""
        rows = range(len(paths))
        self.step(rows, dict.fromkeys(rows, ()), [TokenTree.empty()] * len(rows), paths)

    def step(
        self,
        rows: Sequence[int],
        drafts: Mapping[int, Sequence[TokenTree]],
        trees: Sequence[TokenTree],
        paths: Sequence[Path],
    ) -> None:
        """A forward verified a tree of each of `rows`; the other arguments are for all rows.

        `drafts` are by row, one of every drafter.
        """
        seconds = self._elapsed()
        for row in rows:
            path = paths[row]
            # The root is the first of the fed tokens.
            nodes = [fed - 1 for fed in path.accepted[1:]]
            self._add(row, path.tokens, seconds, drafts[row], trees[row], nodes)
        self._forward += 1

    def plain(self, generated: Sequence[Sequence[int]]) -> None:
        """transformers' own loop wrote these tokens, one a forward and row that had not ended."""
        for index in range(max(map(len, generated))):
            for row, token_ids in enumerate(generated):
                if index < len(token_ids):
                    self._add(row, [token_ids[index]], {}, (), TokenTree.empty(), [])
            self._forward += 1

    def end(self, end: int) -> None:
        """What rows wrote beyond `end` tokens, waiting for others, is not part of the result."""
        self._end = end

    def of_row(self, row: int) -> list[Step]:
        return [step for step in self.steps if step.row == row]

    def generated(self, row: int) -> Int32Array:
        """int32 [n], the tokens that the row was given."""
        steps = [step.token_ids for step in self.of_row(row)]
        return np.concatenate([np.empty(0, np.int32), *steps])[: self._end]

    def credits(self, row: int) -> list[str]:
        """The source of each of the row's generated tokens."""
        return [name for step in self.of_row(row) for name in step.credits][: self._end]

    def tokens_by_origin(self) -> Counter[str]:
        """Generated tokens of all rows by the source that they are credited to."""
        return Counter(name for row in range(len(self.prompts)) for name in self.credits(row))

    def to_dict(self) -> dict[str, Any]:
        rows = range(len(self.prompts))
        return {
            "tier": self.stats.tier,
            "prompts": [prompt.tolist() for prompt in self.prompts],
            "generated": [self.generated(row).tolist() for row in rows],
            "credits": [self.credits(row) for row in rows],
            "seconds": dict(self.stats.seconds),
            "steps": [step.to_dict() for step in self.steps],
        }

    def _elapsed(self) -> dict[str, float]:
        """Seconds by phase since the last step."""
        now = dict(self.stats.seconds)
        spent = {phase: now[phase] - self._seen[phase] for phase in ("prefill", *PHASES)}
        self._seen = now
        return {phase: seconds for phase, seconds in spent.items() if seconds > 0}

    def _add(
        self,
        row: int,
        tokens: Sequence[int],
        seconds: dict[str, float],
        drafts: Sequence[TokenTree],
        tree: TokenTree,
        accepted: Sequence[int],
    ) -> None:
        step = Step(
            row,
            self._forward,
            self._lengths[row],
            tuple(drafts),
            tree,
            np.array(tokens, np.int32),
            np.array(accepted, np.int32),
            seconds,
            self._drafters if drafts else (),
        )
        self._lengths[row] += len(step.token_ids)
        self.steps.append(step)
        for listener in self._listeners:
            listener(step)
