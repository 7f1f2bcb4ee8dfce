"""The drafter protocol: what a source of drafts is, and what it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..host.feature_taps import HiddenLayers
from ..host.fingerprint import fingerprint
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Float64Array, Int32Array, TokenTree
from ..verification.verified import TopLogits
from .call_view import CallView

if TYPE_CHECKING:
    from ..draft_models.residual import ChildDraw


@dataclass(frozen=True)
class FeedbackNeeds:
    """What a drafter asks the engine to hand to `commit`; what no drafter asks for is not computed.

    Attributes:
        logits: logits of the nodes that were fed.
        top_k: how many of their largest logits, where those are enough.
        hidden_layers: boundaries of the residual stream, counted as transformers counts
            `hidden_states` (k: before block k; 0: the embeddings); −1 is the last hidden state
            after the final norm. Their widths are concatenated in this order. Or what gives them
            for the number of the target's blocks.
    """

    logits: bool = False
    top_k: int = 0
    hidden_layers: HiddenLayers = ()


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


Curve = Callable[[int], Float64Array]
"""t(1), …, t(n) of a number n: seconds of a step that feeds so many tokens of a row."""
Tokens = Sequence[Sequence[int]]
"""What came, of each text."""
Feedbacks = Sequence[Feedback | None]
"""What a forward showed of each text; None where there was none, as in a simulation."""


class DraftSession:
    """What a drafter knows of one text: one row of a batch, from its prompt to its end.

    A drafter's own are subclasses with further attributes. A session is used by one thread at a
    time; sessions of one drafter may be used by several.

    Attributes:
        idle: whether the text is never drafted for and teaches nothing, as is known from its start
            on: then the drafter is neither asked nor told.
        ready: whether the text can be drafted for by now; a costly drafter is not asked before,
            which costs nothing.
    """

    idle: bool = False
    ready: bool = True

    def restrict(self, tree: TokenTree) -> TokenTree:
        """The nodes of any drafter's `tree` that can still be chosen, as far as this one knows."""
        return tree

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        """What was drawn below the node that `path` leads to, tokens from the last draft's root.

        None where nothing was drawn there, or nothing is ever drawn.
        """
        return None

    def close(self) -> None:
        """The text is finished; release what the session holds. Called once."""


class Drafter(ABC):
    """A source of drafts. What its sessions share must be safe to use from several threads.

    All methods but `start` are called once in a step for all texts of it, so that a drafter may
    draft for them together.

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

    def prepare(self, sessions: Sequence[Any], curve: Curve | None) -> None:  # noqa: B027
        """Make what is needed before `propose`, which is called next; asked of costly drafters. The
        time it takes is not held against the drafts.

        Args:
            sessions: this drafter's.
            curve: what steps take, to size drafts by; None: costs do not count.
        """

    @abstractmethod
    def propose(self, sessions: Sequence[Any], budgets: Sequence[int]) -> Sequence[TokenTree]:
        """A tree for each session: candidate nodes below the last token of its text, as many as
        its budget at most; it may be empty. A `Forest` has all trees in one array."""

    @abstractmethod
    def commit(self, sessions: Sequence[Any], tokens: Tokens, feedbacks: Feedbacks) -> None:
        """Append its tokens, at least one, to the text of each session, and learn from the forward
        that produced them. The first call follows the prefill."""

    @property
    def origins(self) -> tuple[str, ...]:
        """Where this drafter's nodes come from, as records of calls name it."""
        return (self.name.replace("_", " "),)

    def origins_of(self, classes: Int32Array) -> Int32Array:
        """int32 [n]: for nodes of these evidence classes, int32 [n], the index in `origins`."""
        return np.zeros(len(classes), np.int32)


@dataclass(frozen=True)
class Target:
    """The model that is being assisted, and what is known of a text before it begins.

    Attributes:
        vocab_size: rows of the output layer; every drafted id lies below it.
        device: where the logits are.
        fingerprint: equal for equal model and tokenizer ids; keys what is learnt from outputs.
        model: the model itself, for drafters that share its embeddings; None in a simulation.
        learn: whether the text may teach other sessions anything.
        expected: int32 [n] each, texts that the output is expected to resemble.
        forms: that the output is expected to fill in; None: none.
        call: the call of `generate`.
    """

    vocab_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fingerprint: str = ""
    model: Any = None
    learn: bool = True
    expected: tuple[Int32Array, ...] = ()
    forms: Any = None
    call: CallView = field(default_factory=CallView)

    @classmethod
    def of(cls, model: Any) -> Target:
        """A transformers model, for texts that no call of `generate` writes."""
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        return cls(vocab_size, model.device, fingerprint(model), model)

    @property
    def is_confidential(self) -> bool:
        """Whether what drafts for the text show must not be kept for others: a caller told what to
        expect in confidence, and so is what comes of it."""
        return bool(self.expected or self.forms or not self.learn)

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
