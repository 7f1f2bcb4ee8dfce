"""The draft types: a tree of candidate tokens below a text's last token, and a forest of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, le
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..structures import draft_tree
from ..system.lazy import cached_property

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Ids = Sequence[int] | NDArray[np.integer]


def checked_ids(name: str, token_ids: Any, vocab_size: int = 2**31) -> Int32Array:
    """A text's ids as int32 [n], for an argument of this name.

    Raises:
        TypeError: they are no integers.
        ValueError: they are no single sequence, or one is not below `vocab_size`.
    """
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # lists of several lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1:
        raise ValueError(f"{name}: expected a flat sequence of ids, got {token_ids!r:.80}")
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integer ids, got {ids.dtype}")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {wrong}")
    return ids.astype(np.int32)


class NamedIds(NamedTuple):
    """A document of a corpus.

    Attributes:
        name: by which it is told; "" where it has none.
        token_ids: [n].
    """

    name: str
    token_ids: Ids


def named_ids(name: str, document: Any, vocab_size: int = 2**31) -> tuple[str, Int32Array]:
    """A document's own name, "" where it has none, and its ids, int32 [n], for an argument of this
    name; raises what `checked_ids` does."""
    own = ""
    if isinstance(document, NamedIds):
        own, document = document
    return own, checked_ids(name, document, vocab_size)


def checked_documents(corpus: Iterable[Any]) -> Iterator[Int32Array]:
    """Each document that has any ids, int32 [n]; raises what `checked_ids` does, and ValueError
    behind a corpus without a token."""
    empty = True
    for number, document in enumerate(corpus):
        _, ids = named_ids(f"corpus: document {number}", document)
        if len(ids):
            empty = False
            yield ids
    if empty:
        raise ValueError("corpus: expected at least one token, got none")


def ancestor_mask(parents: Int32Array) -> NDArray[np.bool_]:
    """See `TokenTree.ancestor_mask`."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Arrays of nodes, of one tree or of several."""

    token_ids: Int32Array
    parents: Int32Array
    probs: Float32Array
    classes: Int32Array

    _arrays = property(attrgetter("token_ids", "parents", "probs", "classes"))

    @property
    def expected_tokens(self) -> float:
        """Expected number of accepted nodes when all of them are verified."""
        return float(self.probs.sum())


@dataclass(frozen=True, eq=False)
class TokenTree(_Nodes):
    """Candidate continuations of a text, sharing prefixes.

    The root, the last token of the text, is not among the nodes: the model has not processed it
    yet, so it is fed in front of them.

    Attributes:
        token_ids: int32 [n].
        parents: int32 [n], index of each node's parent, −1 for children of the root. Parents come
            before their children, and siblings carry different tokens.
        probs: float32 [n], estimated probability that the node is accepted (that the text goes on
            along the path to it), never above its parent's.
        classes: int32 [n], the evidence class each node's probability was read from, by which the
            estimate is calibrated; −1 where there is none.
    """

    @classmethod
    def empty(cls) -> TokenTree:
        """The draft of a plain decoding step."""
        return _EMPTY

    @classmethod
    def build(
        cls,
        token_ids: Sequence[int] | Int32Array,
        parents: Sequence[int] | Int32Array,
        probs: Sequence[float] | Float32Array,
        classes: Sequence[int] | Int32Array | None = None,
    ) -> TokenTree:
        """A tree from sequences or arrays of equal length, converted to the contract's dtypes."""
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        kinds = np.full(len(tokens), -1) if classes is None else classes
        parents = np.ascontiguousarray(parents, dtype=np.int32)
        probs = np.ascontiguousarray(probs, dtype=np.float32)
        return cls(tokens, parents, probs, np.ascontiguousarray(kinds, dtype=np.int32))

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int] | Int32Array,
        probs: Sequence[float] | Float32Array,
        classes: Sequence[int] | Int32Array | None = None,
    ) -> TokenTree:
        """A tree with a single path."""
        return cls.build(
            token_ids, np.arange(-1, len(token_ids) - 1, dtype=np.int32), probs, classes
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def depths(self) -> Int32Array:
        """int32 [n], children of the root being at depth 1."""
        return draft_tree.depths(self.parents)

    @cached_property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool [n, n], True where the column is the row's node or one of its ancestors."""
        return ancestor_mask(self.parents)

    def child(self, parent: int, token: int) -> int:
        """Index of the child of `parent` (−1: the root) that carries `token`, or −1."""
        return Forest.of([self]).child(0, parent, token)

    def follow(self, token_ids: Sequence[int] | Int32Array) -> Int32Array:
        """Nodes on the path spelt by `token_ids`, as far as the tree goes along with it."""
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        return draft_tree.follow(self.token_ids, self.parents, tokens)

    def path(self, node: int) -> Int32Array:
        """Nodes from the root's child down to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return np.array(nodes[::-1], dtype=np.int32)

    def select(self, nodes: Int32Array) -> TokenTree:
        """The tree of the given nodes (ascending, and with every node its parent)."""
        new_index = np.full(len(self) + 1, -1, np.int32)
        new_index[nodes] = np.arange(len(nodes), dtype=np.int32)
        # The spare last entry answers for the root, whose index −1 reads it.
        parents = new_index[self.parents[nodes]]
        return TokenTree(self.token_ids[nodes], parents, self.probs[nodes], self.classes[nodes])

    def prune(self, budget: int) -> TokenTree:
        """The `budget` most probable nodes; closed under parents.

        Ties go to the earlier node, which cannot be a descendant.
        """
        if budget >= len(self):
            return self
        return Forest.of([self]).prune(budget)[0]

    def without_nan(self) -> TokenTree:
        """The tree without nodes whose probability is not a number, and what is below them.

        A forward of a model that drafts may overflow. Arrays of other kinds or lengths stay.
        """
        arrays = [field for field in self._arrays if isinstance(field, np.ndarray)]
        alike = len(arrays) == 4 and len({field.shape for field in arrays}) == 1
        if not alike or self.probs.dtype != np.float32:
            return self
        return self.without(np.isnan(self.probs))

    def without(self, lost: NDArray[np.bool_]) -> TokenTree:
        """The tree without these nodes, bool [n], and what is below them."""
        if not lost.any():
            return self
        for node, parent in enumerate(self.parents.tolist()):
            lost[node] |= 0 <= parent < node and lost[parent]
        return self.select(np.flatnonzero(~lost).astype(np.int32))

    def cut_depth(self, max_depth: int) -> TokenTree:
        """The nodes at most `max_depth` deep."""
        if len(self) <= max_depth:
            return self
        keep = self.depths <= max_depth
        return self if keep.all() else self.select(np.flatnonzero(keep).astype(np.int32))

    def merge(self, other: TokenTree) -> TokenTree:
        """The union of both trees; a node in both keeps the higher probability and its class."""
        return Forest.of([self]).merge(Forest.of([other]))[0]

    def fault(self, vocab_size: int, n_classes: int) -> str | None:
        """What breaks the contract above, in words; None: nothing does.

        Args:
            vocab_size: ids have to be below it.
            n_classes: evidence classes that `classes` may name.
        """
        return draft_tree.fault(*self._arrays, None, vocab_size, n_classes)


_EMPTY = TokenTree.build([], [], [])


@dataclass(frozen=True, eq=False)
class Forest(_Nodes, Sequence[TokenTree]):
    """The token trees of several texts, one behind another in one array for each field.

    Attributes:
        token_ids, parents, probs, classes: [n], as a `TokenTree` has them; parents count from the
            beginning of their own tree.
        offsets: int64 [trees + 1], where each tree begins, and the end of the last one.
    """

    offsets: Int64Array

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """The trees, which keep the contract of a `TokenTree`, in their order."""
        if isinstance(trees, Forest):
            return trees
        if len(trees) == 1:
            (one,) = trees
            offsets = np.array([0, len(one)])
            return cls(one.token_ids, one.parents, one.probs, one.classes, offsets)
        if not any(map(len, trees)):
            return cls.empty(len(trees))
        arrays = zip(*(tree._arrays for tree in trees), strict=True)
        tokens, parents, probs, classes = map(np.concatenate, arrays)
        offsets = np.fromiter(accumulate(map(len, trees), initial=0), np.int64, len(trees) + 1)
        return cls(tokens, parents, probs, classes, offsets)

    @classmethod
    @lru_cache(maxsize=64)
    def empty(cls, trees: int) -> Forest:
        """So many trees without nodes."""
        none, probs = np.empty(0, np.int32), np.empty(0, np.float32)
        return cls(none, none, probs, none, np.zeros(trees + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> TokenTree:  # type: ignore[override]  # no slices
        if not len(self.token_ids):
            return _EMPTY
        return self._tree(slice(self.offsets[index], self.offsets[index + 1]))

    def __iter__(self) -> Iterator[TokenTree]:
        if not len(self.token_ids):
            return repeat(_EMPTY, len(self))
        bounds = self.offsets.tolist()
        return map(self._tree, map(slice, bounds, bounds[1:]))

    def _tree(self, nodes: slice) -> TokenTree:
        ids, parents = self.token_ids[nodes], self.parents[nodes]
        return TokenTree(ids, parents, self.probs[nodes], self.classes[nodes])

    def child(self, index: int, parent: int, token: int) -> int:
        """What `TokenTree.child` finds in a tree."""
        if not len(self.token_ids):
            return -1
        nodes = self.token_ids, self.parents, self.offsets
        found: int = draft_tree.child(*nodes, index, parent, token)
        return found

    def spread(self, places: Sequence[int], trees: int) -> Forest:
        """So many trees, of which these stand at ascending places and all others have no nodes."""
        if len(places) == trees:
            return self
        sizes = np.zeros(trees, np.int64)
        sizes[places] = self.sizes
        offsets = np.append(0, np.cumsum(sizes))
        return Forest(self.token_ids, self.parents, self.probs, self.classes, offsets)

    def first(self, index: int) -> tuple[float, int]:
        """Probability and token of a tree's first node; 0 and −1 where it has none."""
        place = self.offsets[index]
        if place == self.offsets[index + 1]:
            return 0.0, -1
        return float(self.probs[place]), int(self.token_ids[place])

    @cached_property
    def sizes(self) -> list[int]:
        """Nodes of each tree."""
        return [end - begin for begin, end in pairwise(self.offsets.tolist())]

    def merge(self, other: Forest) -> Forest:
        """Tree by tree what `TokenTree.merge` makes of two."""
        if not len(other.token_ids):
            return self
        if not len(self.token_ids):
            return other
        return Forest(*draft_tree.merge(*self._arrays, self.offsets, *other._arrays, other.offsets))

    def cut_depths(self, max_depths: Sequence[int | None]) -> Forest:
        """Each tree's nodes at most so deep; None: all of them."""
        bounds = [d for d in max_depths if d is not None]
        if not bounds or max(self.sizes) <= min(bounds):
            return self
        pairs = zip(self, max_depths, strict=True)
        return Forest.of([tree if d is None else tree.cut_depth(d) for tree, d in pairs])

    def prune(self, budgets: Sequence[int] | int) -> Forest:
        """Each tree's most probable nodes, so many; see `TokenTree.prune`."""
        if isinstance(budgets, int):
            budgets = [budgets] * len(self.sizes)
        if all(map(le, self.sizes, budgets)):
            return self
        most = np.array(budgets, np.int64)
        return Forest(*draft_tree.prune(*self._arrays, self.offsets, most))

    def best_paths(self) -> Forest:
        """Each tree's path with the largest sum of probabilities."""
        return Forest(*draft_tree.best_paths(*self._arrays, self.offsets))

    def fault(self, vocab_size: int, n_classes: int) -> str | None:
        """What breaks a tree's contract, in words; see `TokenTree.fault`."""
        return draft_tree.fault(*self._arrays, self.offsets, vocab_size, n_classes)


@dataclass(frozen=True)
class Limits:
    """What one forward can verify of the drafts of some rows, whatever would pay.

    Attributes:
        depths: of each row's tree; None: any.
        nodes: of each row's tree; None: any.
        total: nodes of all trees together, where rows are fed without padding; None: any.
        backlog: tokens that every row is fed besides its root and its nodes.
        chains: whether drafts have to be single paths.
        packed: whether rows are fed without padding, each as many nodes as it is worth.
    """

    depths: Sequence[int | None] | None = None
    nodes: int | None = None
    total: int | None = None
    backlog: int = 0
    chains: bool = False
    packed: bool = False

    def within(self, drafts: Sequence[TokenTree]) -> Forest:
        """The part of each draft that can be verified at all."""
        forest = Forest.of(drafts)
        if not len(forest.token_ids):
            return forest
        if self.depths is not None:
            forest = forest.cut_depths(self.depths)
        if self.chains:
            forest = forest.best_paths()
        return forest if self.nodes is None else forest.prune(self.nodes)
