"""The published systems as assistants, all on the same loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from . import give_generate_its_keyword
from .assistants import Assistant, union
from .corpus.datastore import Datastore
from .drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter, Tokens
from .drafters.base import Drafter, DraftSession
from .drafters.dflash import DFlashDrafter, is_dflash
from .drafters.draft_model import DraftModelDrafter
from .drafters.eagle import EagleDrafter
from .drafters.mtp import MtpDrafter
from .drafters.rest import RestDrafter
from .drafters.shared_keys import SharedKeysDrafter, reads_shared_keys
from .drafters.suffix import SuffixDrafter
from .drafters.token_recycling import TokenRecyclingDrafter
from .eagle.head import EagleHead
from .memory.output_memory import OutputMemory
from .target.mtp_head import MtpHead
from .token_tree import TokenTree

# The longest draft from a match where the planner says how much of it pays.
_LONGEST_DRAFT = 256
# Corpus continuations rarer than this cost more to look at than they bring.
_LEAST_PROB = 0.01

# SuffixDecoding's nodes for each matched token.
_PAPER_ALPHA = 4.0


_NAMED: dict[str, Callable[[bool], Drafter]] = {
    "token_recycling": lambda paper: TokenRecyclingDrafter(last_logits=not paper),
    "mtp": lambda paper: MtpDrafter(),
}


def fallback_drafters(fallback: Any, paper: bool = False) -> list[Drafter]:
    """The drafters that a preset's `fallback=` names; cheap ones first, so that costly ones are
    asked for what the others lack.

    Args:
        fallback: see :class:`SamAssistant`.
        paper: whether named ones draft as their papers do.

    Raises:
        ValueError: an unknown name.
        TypeError: something that cannot draft.
    """
    if fallback is None:
        return []
    several = fallback if isinstance(fallback, (list, tuple)) else [fallback]
    drafters = [_fallback_drafter(one, paper) for one in several]
    return sorted(drafters, key=lambda drafter: drafter.costly)


def _fallbacks(fallback: Any, options: dict[str, Any]) -> list[Drafter]:
    return fallback_drafters(fallback, options.get("budget") == "paper")


def _fallback_drafter(fallback: Any, paper: bool) -> Drafter:
    names = " or ".join(map(repr, _NAMED))
    if isinstance(fallback, str):
        if fallback not in _NAMED:
            raise ValueError(f"fallback: expected {names}, got {fallback!r}")
        return _NAMED[fallback](paper)
    if isinstance(fallback, Drafter):
        return fallback
    if isinstance(fallback, EagleHead):
        return EagleDrafter(fallback)
    if isinstance(fallback, MtpHead):
        return MtpDrafter(head=fallback)
    if isinstance(fallback, PreTrainedModel):
        return _drafter_of_model(fallback)
    raise TypeError(
        f"fallback: expected {names}, a draft model, an EagleHead, an MtpHead, a drafter, a list "
        f"of these or None, got {type(fallback).__name__}"
    )


def _drafter_of_model(model: PreTrainedModel) -> Drafter:
    """By what the model is configured to be fed."""
    if is_dflash(model):
        return DFlashDrafter(model)
    if reads_shared_keys(model):
        return SharedKeysDrafter(model)
    return DraftModelDrafter(model)


def _require(kind: type, **arguments: Any) -> None:
    """TypeError where an argument is of another kind."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")


class SamAssistant(Assistant):
    """SAM-Decoding (Hu et al., 2024): suffix automata over the text itself and over a corpus.

    Under `budget="auto"` the text, the memory and the corpus are weighed as `SuffixAssistant`
    weighs its trees, from which this preset then differs in its sources alone; a `Datastore` drafts
    beside them. `budget="paper"` applies the paper's rule (section 3.3): the longer match drafts, a
    corpus match counting `corpus_bias` tokens less, and below `min_match` tokens the fallback does.

    Args:
        corpus: documents as sequences of token ids, indexed once, in memory; or a `Datastore`.
        fallback: "token_recycling"; "mtp", the target's own multi-token-prediction layers; a draft
            model, of any tokenizer; a DFlash model; a Gemma 4 assistant; an `EagleHead`; an
            `MtpHead`; a drafter; None. Or a list of these, whose drafts become one tree.
        min_match: shortest match that drafts under "paper", in tokens.
        corpus_bias: tokens by which a corpus match must be longer than one in the text.
        max_draft: longest draft from a match under "paper".
        memory: earlier outputs to draft from, and to teach; None learns nothing.
        **options: of :class:`Assistant`.

    Raises:
        ValueError: a bad size or an empty corpus; from `generate`, a corpus id outside the model's
            vocabulary.
        TypeError: an argument of another kind than said.
    """

    def __init__(
        self,
        corpus: Iterable[Tokens] | Datastore | None = None,
        fallback: Any = "token_recycling",
        min_match: int = 5,
        corpus_bias: int = 5,
        max_draft: int = 40,
        memory: OutputMemory | None = None,
        **options: Any,
    ):
        for name, value in (("min_match", min_match), ("corpus_bias", corpus_bias)):
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        if max_draft < 1:
            raise ValueError(f"max_draft: expected at least 1, got {max_draft}")
        if corpus is not None:
            _require(Iterable if not isinstance(corpus, Datastore) else Datastore, corpus=corpus)
        if memory is not None:
            _require(OutputMemory, memory=memory)
        self.memory = memory
        self.min_match = min_match
        self.corpus_bias = corpus_bias
        if options.get("budget") == "paper":
            matchers = _automata(corpus, max_draft)
        else:
            matchers = _mixed_sources(corpus, memory, max(max_draft, _LONGEST_DRAFT))
        self._matchers = len(matchers)
        if memory is not None and options.get("budget") == "paper":
            matchers.append(SuffixDrafter(memory))
        super().__init__([*matchers, *_fallbacks(fallback, options)], **options)

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        biases = [0, *[self.corpus_bias] * (self._matchers - 1)]
        matchers: Any = sessions[: self._matchers]
        matches = [
            session.match_length - bias for session, bias in zip(matchers, biases, strict=True)
        ]
        longest = max(matches)
        if longest >= self.min_match:
            return drafts[matches.index(longest)]
        return union(drafts[self._matchers :])


def _automata(corpus: Iterable[Tokens] | Datastore | None, max_draft: int) -> list[Drafter]:
    """What SAM-Decoding drafts from: the text, and a corpus."""
    own = AutomatonDrafter(max_draft)
    if corpus is None:
        return [own]
    if isinstance(corpus, Datastore):
        return [own, RestDrafter(corpus, max_nodes=max_draft, continuation=max_draft)]
    return [own, StaticAutomatonDrafter(corpus, max_draft, min_prob=_LEAST_PROB)]


def _mixed_sources(
    corpus: Iterable[Tokens] | Datastore | None, memory: OutputMemory | None, max_draft: int
) -> list[Drafter]:
    """One drafter for the text, the memory and a corpus in memory; one more for a datastore."""
    on_disk = isinstance(corpus, Datastore)
    in_memory: Any = None if on_disk else corpus
    mixed = SuffixDrafter(memory, corpus=in_memory, learn=memory is not None)
    if not on_disk:
        return [mixed]
    datastore: Any = corpus
    return [mixed, RestDrafter(datastore, max_nodes=max_draft, continuation=max_draft)]


class SuffixAssistant(Assistant):
    """SuffixDecoding (Oliaro et al., 2024): suffix trees over the text and over earlier outputs.

    `budget="paper"` drafts by the paper's Algorithm 1, and with the fallback where the SCORE of the
    suffix draft is below `threshold` (the paper's hybrid).

    Args:
        memory: earlier outputs to draft from, and to teach; None for a new one, at hand as
            `assistant.memory`.
        max_depth: longest match plus draft, in tokens.
        alpha: nodes for each matched token, at most; None: 4 under "paper", otherwise no limit.
        min_prob: no node is drafted that is estimated to be less probable; None: 0.02 under
            "paper", otherwise 0.002.
        tree: draft trees; otherwise single paths.
        fallback: as for :class:`SamAssistant`.
        threshold: SCORE from which on "paper" drafts from the trees; None: the number of tokens
            that the fallback's draft is expected to bring.
        **options: of :class:`Assistant`.

    Raises:
        ValueError: a bad size or probability.
        TypeError: an argument of another kind than said.
    """

    def __init__(
        self,
        memory: OutputMemory | None = None,
        max_depth: int = 64,
        alpha: float | None = None,
        min_prob: float | None = None,
        tree: bool = True,
        fallback: Any = "token_recycling",
        threshold: float | None = None,
        **options: Any,
    ):
        if memory is not None:
            _require(OutputMemory, memory=memory)
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"threshold: expected None or at least 0, got {threshold}")
        paper = options.get("budget") == "paper"
        if alpha is None:
            alpha = _PAPER_ALPHA if paper else float("inf")
        if min_prob is None:
            min_prob = 0.02 if paper else 0.002
        drafter = SuffixDrafter(memory, max_depth, alpha, min_prob, tree, scored=paper)
        self.threshold = threshold
        self.memory = drafter.memory
        super().__init__([drafter, *_fallbacks(fallback, options)], **options)

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        suffix: Any = sessions[0]
        fallback = union(drafts[1:])
        threshold = fallback.expected_tokens if self.threshold is None else self.threshold
        return drafts[0] if suffix.score >= threshold or not len(fallback) else fallback


class RolloutAssistant(Assistant):
    """For reinforcement learning: samples of one prompt draft from one another.

    Training asks for several outputs of each prompt, in one batch or one after another, and for
    more of them in every epoch. Each draft comes from its own text and from what was written for
    the same prompt, by rows of the same batch while they are written and in epochs before; outputs
    fade as the policy moves on. Rollouts of this kind are drafted from trees per prompt also in
    "Beat the Long Tail" (arXiv 2511.13841).

    Weights may change between calls. Sampled outputs keep their distribution.

    Args:
        memory: earlier outputs; None for a new one with the next two arguments, at hand as
            `assistant.memory`.
        half_life: outputs of a prompt after which an older one counts half; see
            :class:`OutputMemory`.
        max_bytes: of the memory. The oldest outputs go first, so that room for an epoch's outputs
            (50 to 80 bytes a token) is enough.
        max_depth: longest match plus draft, in tokens.
        min_prob: no node is drafted that is estimated to be less probable.
        fallback: as for :class:`SamAssistant`.
        **options: of :class:`Assistant`.
    """

    def __init__(
        self,
        memory: OutputMemory | None = None,
        half_life: float = 16.0,
        max_bytes: int = 1 << 30,
        max_depth: int = 64,
        min_prob: float = 0.02,
        fallback: Any = None,
        **options: Any,
    ):
        if memory is None:
            memory = OutputMemory(max_bytes, max_depth, half_life=half_life)
        _require(OutputMemory, memory=memory)
        self.memory = memory
        drafter = SuffixDrafter(memory, max_depth, min_prob=min_prob, by_prompt=True)
        super().__init__([drafter, *_fallbacks(fallback, options)], **options)


class RestAssistant(Assistant):
    """REST (He et al., 2023): drafts from a corpus on disk, the most frequent continuations first.

    Args:
        datastore: of the model's tokenizer.
        max_match: the longest context looked up, in tokens.
        max_nodes: of a draft.
        continuation: tokens of a draft's longest path.
        **options: of :class:`Assistant`.
    """

    def __init__(
        self,
        datastore: Datastore,
        max_match: int = 16,
        max_nodes: int = 64,
        continuation: int = 10,
        **options: Any,
    ):
        _require(Datastore, datastore=datastore)
        self.datastore = datastore
        super().__init__([RestDrafter(datastore, max_match, max_nodes, continuation)], **options)


class SequoiaAssistant(Assistant):
    """Sequoia (Chen et al., 2024): optimal trees of a small draft model.

    Args:
        draft_model: a transformers model with the target's vocabulary.
        temperature: None drafts the draft model's most probable tokens, and generation keeps its
            seed. A number, for sampling: children are drawn without replacement at this
            temperature and verified by residual sampling, which keeps the distribution of the
            output but not the seed.
        max_nodes: of a draft.
        max_levels: forwards of the draft model for one draft.
        width: children of a node at most.
        **options: of :class:`Assistant`.

    Raises:
        ValueError: a bad size; from `generate`, another vocabulary than the target's.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        temperature: float | None = None,
        max_nodes: int = 63,
        max_levels: int = 8,
        width: int = 8,
        **options: Any,
    ):
        _require(torch.nn.Module, draft_model=draft_model)
        drafter = DraftModelDrafter(
            draft_model,
            max_nodes=max_nodes,
            max_levels=max_levels,
            width=width,
            temperature=temperature,
        )
        super().__init__([drafter], residual=temperature is not None, **options)


# Whoever imports an assistant from here wants to hand it to `generate`.
give_generate_its_keyword()
