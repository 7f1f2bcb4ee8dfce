"""The drafter protocol: what a source of drafts is, and what the engine tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..host.fingerprint import fingerprint
from ..types.evidence import EvidenceClasses
from ..types.passages import Source
from ..types.token_tree import Int32Array, TokenTree
from ..verification.verified import TopLogits

if TYPE_CHECKING:
    # It takes transformers with it, which other engines draft without.
    from ..verification.own_forwards import TargetForwards

Float64Array = NDArray[np.float64]
Graphs = bool | Literal["fused"]
"""Whether forwards may be repeated from recordings; see :class:`~..assistants.Assistant`."""


class Among:
    """Tokens of a vocabulary that columns of logits stand for: the first ones, and some others.

    Args:
        token_ids: int64 [columns] on the CPU, different.
        vocab_size: of all.
        first: so many columns are of the tokens from 0 on.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int, first: int) -> None:
        self.token_ids, self.vocab_size = token_ids, vocab_size
        self._first, self._rest = first, token_ids[first:]
        self._scores: torch.Tensor | None = None

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores float32 [1, columns] as [1, vocab_size], −∞ of others, until the next call."""
        if self._scores is None:
            self._scores = scores.new_full((1, self.vocab_size), -torch.inf)
        self._scores[:, : self._first] = scores[:, : self._first]
        self._scores[:, self._rest] = scores[:, self._first :]
        return self._scores


class Law(NamedTuple):
    """What becomes of probabilities before a token is drawn of them, in this order.

    Attributes:
        temperature: 0: the likeliest token is taken.
        top_k, top_p, min_p: as transformers has them.
    """

    temperature: float = 0.0
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    min_p: float = 0.0


class Preview(Protocol):
    """What the target would choose in one text of a call, were given logits its own."""

    @property
    def law(self) -> Law:
        """What decides between tokens, as far as it is known."""

    def ahead(self, vocab_size: int, levels: int) -> list[Any]:
        """The random numbers of the text's next draws, of so many at most: uint32 [2 vocab_size] or
        more each, see `structures.draws.Numbers`. None where they are not known at once."""

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; otherwise the greatest is taken."""

    @property
    def greedy(self) -> bool:
        """Whether the greatest logit is chosen, untouched."""

    def knows(self, vocab_size: int) -> bool:
        """Whether nothing is left to chance: the choice is greedy, or its draws are known."""

    def best(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        count: int,
        among: Among | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first choices behind nodes of a draft.

        Args:
            logits: [nodes, vocab_size] of a model that drafts, or [1, columns] of some tokens.
            paths: for each node the drafted tokens from the text's last token, without that, to
                the node, with it.
            count: choices of each node.
            among: the tokens that logits are given of; None: all.

        Returns:
            float32 [nodes, count], descending: processed logits, or logarithms of what their
            probabilities come to when they are divided by the draw's numbers, up to a constant of
            each node; −∞ where there is no choice; and int64 [nodes, count], the tokens.
        """


@dataclass(frozen=True)
class Target:
    """The model that is being assisted, as far as a drafter may look at it.

    Attributes:
        vocab_size: rows of the output layer; every drafted id lies below it.
        device: where the logits are.
        fingerprint: equal for equal model and tokenizer ids; keys what is learnt from outputs.
        model: the model itself, for drafters that share its embeddings; None in a simulation.
        learn: whether the text may teach other sessions anything.
        expected: int32 [n] each, texts that the output is expected to resemble.
        forms: that the output is expected to fill in; None: none.
        preview: what the call would choose of a drafter's logits, its random draws included; None
            where there is no call, as in a simulation.
        own: the model's forwards behind the call's texts; None where there is no call.
        processors: the call's logits processors, which a drafter may read and must not call.
        row: the text's place in the batch.
        graphs: whether forwards on an accelerator may be repeated from recordings.
        extra_memory: bytes that copies of weights may take; None: as the machine has them.
        counts_costs: whether drafters are left alone that do not earn their time.
    """

    vocab_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fingerprint: str = ""
    model: Any = None
    learn: bool = True
    expected: tuple[Int32Array, ...] = ()
    forms: Any = None
    preview: Preview | None = None
    own: TargetForwards | None = None
    processors: tuple[Any, ...] = ()
    row: int = 0
    graphs: bool = True
    extra_memory: int | None = None
    counts_costs: bool = False

    @classmethod
    def of(cls, model: Any) -> Target:
        """A transformers model, for texts that no call of `generate` writes."""
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        return cls(vocab_size, model.device, fingerprint(model), model)

    def known(self, token_ids: Any) -> Int32Array:
        """A text's ids as drafters are told them, int32 of the same shape.

        Placeholders, which stand for no token of the vocabulary, become its last one: whatever
        looks ids up can, and what it drafts for them is verified like all else.
        """
        ids = np.asarray(token_ids)
        last = self.vocab_size - 1
        return np.where((ids >= 0) & (ids <= last), ids, last).astype(np.int32)

    def require_model(self, drafter: str) -> Any:
        """The model, for a drafter that cannot do without.

        Raises:
            ValueError: there is none.
        """
        if self.model is None:
            raise ValueError(f"{drafter}: expected the target model, got none (a simulation)")
        return self.model

    def require_ids(self, source: str, largest_id: int) -> None:
        """ValueError for what may draft an id that the target does not have."""
        if largest_id >= self.vocab_size:
            raise ValueError(
                f"{source}: expected ids below the vocabulary size {self.vocab_size}, "
                f"got {largest_id}"
            )

    def require_width(self, drafter: str, hidden_size: int) -> None:
        """ValueError for what was made for another hidden size than the model's."""
        if self.model is None:
            return
        width = self.model.config.get_text_config(decoder=True).hidden_size
        if width != hidden_size:
            raise ValueError(
                f"{drafter}: expected one for the target's hidden size of {width}, got one for "
                f"{hidden_size}"
            )


@dataclass(frozen=True)
class FeedbackNeeds:
    """What a drafter asks the engine to hand to `commit`; nothing else is computed.

    Attributes:
        logits: logits of the nodes that were fed.
        top_k: how many of their largest logits, where those are enough.
        hidden_layers: boundaries of the residual stream, counted as transformers counts
            `hidden_states` (k: before block k; 0: the embeddings); −1 is the last hidden state
            after the final norm. Their widths are concatenated in this order.
    """

    logits: bool = False
    top_k: int = 0
    hidden_layers: tuple[int, ...] = ()


@dataclass
class Feedback:
    """What one forward showed about one row of the batch.

    Attributes:
        token_ids: int32 [m], the tokens that were fed: the root and the verified nodes, or, after
            the prefill, the last tokens of the prompt.
        accepted: int32 [a], indices into `token_ids` of the ones that belong to the text, in order
            (the root and the accepted nodes; after the prefill those with hidden states, or all).
        parents: int32 [m], the index of the token that each one follows; −1: the text before.
        logits: [m, vocab_size] on the target's device, aligned with `token_ids`, after the prefill
            maybe with the last of them only; None when no drafter asked or none were computed.
        top: the largest logits, aligned with `token_ids`; None as for `logits`.
        hidden_states: [a, width], aligned with `accepted`; None when no drafter asked.
    """

    token_ids: Int32Array
    accepted: Int32Array
    parents: Int32Array
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    top: TopLogits | None = None


@dataclass(frozen=True)
class ChildDraw:
    """What residual verification must know of a node.

    Attributes:
        draft: [vocab_size], the distribution its children were drawn from.
        children: int64 [k], the tokens, in the order drawn without replacement.
    """

    draft: torch.Tensor
    children: torch.Tensor


class DraftSession(ABC):
    """One text being generated: one row of a batch, from its prompt to its end.

    A session is used by one thread at a time; sessions of one drafter may run on several.

    Attributes:
        idle: whether it never drafts for its text and learns nothing from it, as is known from its
            start on: then it is neither asked nor told.
        ready: whether it can draft by now; a costly drafter is not asked before, which costs
            nothing.
    """

    idle: bool = False
    ready: bool = True

    @abstractmethod
    def propose(self, budget: int) -> TokenTree:
        """Candidate nodes below the last token of the text, `budget` at most; may be empty."""

    def restrict(self, tree: TokenTree) -> TokenTree:
        """The nodes of any drafter's `tree` that can still be chosen, as far as this one knows."""
        return tree

    @abstractmethod
    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        """Append `token_ids` (at least one) to the text.

        The first call follows the prefill and brings the first generated token. `feedback` tells
        of the forward that produced them, or is None where there was none (in a simulation).
        """

    def see_cost(self, curve: Callable[[int], Float64Array]) -> None:  # noqa: B027 - most need not
        """Learn t(n), before a draft, to size it by: `curve(n)`, float64 [n], is the seconds of a
        step that feeds 1, …, n tokens."""

    def sources(self) -> Mapping[str, Source]:
        """Where passages that it drafts from can be looked up, by what they are; they can be after
        the session has been closed, too. Asked where a call is recorded."""
        return {}

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        """What was drawn below the node that `path` leads to, tokens from the last draft's root.

        None where nothing was drawn there, or nothing is ever drawn.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most sessions hold nothing
        """The text is finished; release what the session holds. Called once."""


class BatchSession(DraftSession):
    """A text whose drafter drafts for all rows of a batch at once, and learns from them so, unless
    the session overrides `commit`."""

    drafter: Any

    def propose(self, budget: int) -> TokenTree:
        tree: TokenTree = self.drafter.propose_rows([self], [budget])[0]
        return tree

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self.drafter.commit_rows([self], [token_ids], [feedback])


def close_all(sessions: Sequence[Any]) -> None:
    """Close each session in turn, the others too where one raises."""
    with ExitStack() as stack:
        for session in reversed(sessions):
            stack.callback(session.close)


class Drafter(ABC):
    """A source of drafts. What its sessions share must be safe to use from several threads.

    Attributes:
        name: one lower-case word or two, shown in `stats`.
        needs: see :class:`FeedbackNeeds`.
        costly: drafting takes a share of a forward's time, so the loop drafts with it only where
            that pays.
        evidence: the classes that `TokenTree.classes` of its drafts may name. Calibration starts
            from their priors.
    """

    name: str = "drafter"
    needs: FeedbackNeeds = FeedbackNeeds()
    costly: bool = False
    evidence: EvidenceClasses = EvidenceClasses()

    @abstractmethod
    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        """A session for a prompt (int32 [length], without padding)."""

    def prepare_rows(self, sessions: Sequence[Any]) -> None:  # noqa: B027 - most need nothing
        """Make what drafts of many texts to come need, before these are asked for drafts. The time
        it takes is not held against them."""

    def propose_rows(self, sessions: Sequence[Any], budgets: Sequence[int]) -> Sequence[TokenTree]:
        """What `DraftSession.propose` returns for each session of this drafter, given its budget.

        Called once in a step for all rows of a batch that ask this drafter. For drafters that draft
        for all of them in less time than for one after another, such as by one forward; a `Forest`
        has all trees in one array.
        """
        return [session.propose(budget) for session, budget in zip(sessions, budgets, strict=True)]

    def commit_rows(
        self,
        sessions: Sequence[Any],
        tokens: Sequence[Sequence[int]],
        feedbacks: Sequence[Feedback | None],
    ) -> None:
        """Tell sessions of this drafter what one step brought to each; see `DraftSession.commit`.

        For drafters that learn from all rows of a batch in less time than from one after another.
        """
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            session.commit(token_ids, feedback)

    @property
    def origins(self) -> tuple[str, ...]:
        """Where this drafter's nodes come from, as records of calls name it."""
        return (self.name.replace("_", " "),)

    def origins_of(self, classes: Int32Array) -> Int32Array:
        """int32 [n]: for nodes of these evidence classes, int32 [n], the index in `origins`."""
        return np.zeros(len(classes), np.int32)
