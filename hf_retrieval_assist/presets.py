"""The published systems as assistants, all on the same loop."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar, Unpack

import torch
from transformers import PreTrainedModel

from . import give_generate_its_keyword
from .assistants import Assistant
from .corpus.datastore import Datastore
from .corpus.readers import Corpus, tokenised
from .draft_models.draft_model import DraftModelDrafter
from .draft_models.fallbacks import Fallback, fallback_drafters
from .drafters.base import Drafter
from .drafters.rest import RestDrafter
from .drafters.suffix import SuffixDrafter
from .memory.output_memory import OutputMemory
from .policy.planner import Budget
from .policy.policy import Options
from .system.arguments import kind_of

# The longest draft from a corpus where the planner says how much of it pays.
_LONGEST_DRAFT = 256
# Arguments that are no options: `repr` shows resources in its own way or not at all.
_NOT_SHOWN = ("self", "tokenizer", "memory", "datastore", "draft_model", "costs")


def require(kind: type, **arguments: Any) -> None:
    """TypeError where an argument is of another kind."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            named = kind is OutputMemory and isinstance(value, (str, os.PathLike))
            hint = f"; write OutputMemory(path={str(value)!r})" if named else ""
            raise TypeError(f"{name}: expected {kind.__name__}, got {kind_of(value)}{hint}")


Init = TypeVar("Init", bound=Callable[..., None])


def shows_arguments(init: Init) -> Init:
    """A preset's `__init__` whose signature names each of `Options`, and that keeps for `repr`
    what differs from the defaults."""
    shared = inspect.signature(Assistant).parameters
    *own, _ = inspect.signature(init).parameters.values()
    signature = inspect.Signature([*own, *(shared[name] for name in Options.__annotations__)])
    defaults = {name: one.default for name, one in signature.parameters.items()}

    @functools.wraps(init)
    def initialise(self: Preset, *args: Any, **options: Any) -> None:
        try:
            told = signature.bind(self, *args, **options).arguments
        except TypeError as error:
            wrong = next((name for name in options if name not in defaults), "")
            meant = [
                f"; did you mean {x}= by {wrong}=?" for x in get_close_matches(wrong, defaults, 1)
            ]
            raise TypeError(f"{type(self).__name__}: {error}{''.join(meant)}") from None
        corpus = told.pop("corpus", None)
        self._told = [
            f"{name}={_shown(value)}"
            for name, value in told.items()
            if name not in _NOT_SHOWN and value != defaults[name]
        ]
        if corpus is not None:
            shown = repr(corpus) if isinstance(corpus, str) else "<documents>"
            self._told.insert(0, f"corpus={shown}")
        init(self, *args, **options)

    initialise.__signature__ = signature  # type: ignore[attr-defined]
    return initialise  # type: ignore[return-value]


class Preset(Assistant):
    """An assistant with the sources of a paper."""

    _told: list[str]

    def _arguments(self) -> str:
        """Resources, and what differs from the defaults, as in a call."""
        held = {name: getattr(self, name, None) for name in ("memory", "datastore")}
        shown = [f"{name}={value!r}" for name, value in held.items() if value is not None]
        return ", ".join([*shown, *self._told])


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    plain = value is None or isinstance(value, (str, bool, int, float))
    return repr(value) if plain else f"<{type(value).__name__}>"


class SamAssistant(Preset):
    """Drafts from suffix trees of the text, a memory and a corpus, mixed by their worth.

        assistant = SamAssistant(corpus=["Terms and conditions ..."], tokenizer=tokenizer)
        model.generate(**inputs, assistant=assistant)
        print(assistant.stats)

    The sources are those of SAM-Decoding, whose own rule and automata are
    :class:`~hf_retrieval_assist.papers.SamDecoding`. A `Datastore` drafts beside the trees. The
    other arguments are those of :class:`Assistant`.

    Args:
        corpus: documents, indexed once, in memory: texts, rows of a data set with a "text", or
            sequences of token ids. Or the path of a text file or of a folder of them, or
            "datasets:NAME". Or a `Datastore`, or its path.
        fallback: "auto", logit n-grams and, where it can draft and pays, "quantized_self", the
            target itself with weights in few bits, for which it packs a copy of them as far as
            `extra_memory` allows; "logit_ngrams" or "token_recycling" alone; "mtp", the target's
            own multi-token-prediction layers; a draft model, of any tokenizer; a DFlash model; an
            `EagleHead`; a drafter; None. Or a list of these, whose drafts become one tree.
        memory: earlier outputs to draft from, and to teach; None learns nothing.
        tokenizer: of the model; for a corpus of texts.
        budget: nodes that a step verifies: "auto", as many as pay for themselves by measured
            costs; or a number.

    Raises:
        ValueError: a bad size or an empty corpus; texts without a tokenizer; from `generate`, a
            corpus id outside the model's vocabulary.
        TypeError: an argument of another kind than said.
    """

    @shows_arguments
    def __init__(
        self,
        corpus: Corpus | None = None,
        fallback: Fallback = "auto",
        memory: OutputMemory | None = None,
        *,
        tokenizer: Any = None,
        budget: Budget = "auto",
        max_nodes: int = 255,
        **options: Unpack[Options],
    ):
        if corpus is not None:
            corpus = tokenised(corpus, tokenizer)
        if memory is not None:
            require(OutputMemory, memory=memory)
        self.memory, learn = memory, memory is not None
        sources: list[Drafter]
        if isinstance(corpus, Datastore):
            longest = {"max_nodes": _LONGEST_DRAFT, "continuation": _LONGEST_DRAFT}
            sources = [SuffixDrafter(memory, learn=learn), RestDrafter(corpus, **longest)]
        else:  # one drafter for the text, the memory and the corpus
            sources = [SuffixDrafter(memory, corpus=corpus, learn=learn)]
        sources += fallback_drafters(fallback, memory)
        super().__init__(sources, budget=budget, max_nodes=max_nodes, **options)


class SuffixAssistant(Preset):
    """Drafts from suffix trees of the text and of earlier outputs, mixed by their worth.

    The sources are those of SuffixDecoding, whose own rule is
    :class:`~hf_retrieval_assist.papers.SuffixDecoding`. The other arguments are those of
    :class:`Assistant`.

    Args:
        memory: earlier outputs to draft from, and to teach; None for a new one, at hand as
            `assistant.memory`.
        max_depth: longest match plus draft, in tokens.
        alpha: nodes for each matched token, at most.
        min_prob: no node is drafted that is estimated to be less probable.
        tree: draft trees; otherwise single paths.
        fallback: as for :class:`SamAssistant`.

    Raises:
        ValueError: a bad size or probability.
        TypeError: an argument of another kind than said.
    """

    @shows_arguments
    def __init__(
        self,
        memory: OutputMemory | None = None,
        max_depth: int = 64,
        alpha: float = math.inf,
        min_prob: float = 0.002,
        tree: bool = True,
        fallback: Fallback = "auto",
        *,
        budget: Budget = "auto",
        max_nodes: int = 255,
        **options: Unpack[Options],
    ):
        if memory is not None:
            require(OutputMemory, memory=memory)
        drafter = SuffixDrafter(memory, max_depth, alpha, min_prob, tree)
        self.memory = drafter.memory
        drafters = [drafter, *fallback_drafters(fallback, drafter.memory)]
        super().__init__(drafters, budget=budget, max_nodes=max_nodes, **options)


class RolloutAssistant(Preset):
    """Reinforcement learning: samples of one prompt draft from one another.

    Training asks for several outputs of each prompt, in one batch or one after another, and for
    more of them in every epoch. Each draft comes from its own text and from what was written for
    the same prompt, by rows of the same batch while they are written and in epochs before; outputs
    fade as the policy moves on. Rollouts of this kind are drafted from trees per prompt also in
    "Beat the Long Tail" (arXiv 2511.13841).

    Weights may change between calls. Sampled outputs keep their distribution.
    The other arguments are those of :class:`Assistant`.

    Args:
        memory: earlier outputs; None for a new one with the next two arguments, at hand as
            `assistant.memory`.
        half_life: outputs of a prompt after which an older one counts half, of a new memory; see
            :class:`OutputMemory`. None: 16.
        max_bytes: of a new memory. The oldest outputs go first, so that room for an epoch's outputs
            (50 to 80 bytes a token) is enough; a number, or "4GB". None: 1 GiB.
        max_depth: longest match plus draft, in tokens.
        min_prob: no node is drafted that is estimated to be less probable.
        fallback: as for :class:`SamAssistant`; what the policy thought likely, for any prompt, goes
            with the memory.

    Raises:
        ValueError: `half_life` or `max_bytes` beside a memory, which has its own.
    """

    @shows_arguments
    def __init__(
        self,
        memory: OutputMemory | None = None,
        half_life: float | None = None,
        max_bytes: int | str | None = None,
        max_depth: int = 64,
        min_prob: float = 0.02,
        fallback: Fallback = "logit_ngrams",
        *,
        budget: Budget = "auto",
        max_nodes: int = 255,
        **options: Unpack[Options],
    ):
        own = {"half_life": half_life, "max_bytes": max_bytes}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if memory is None:
            given = {"max_bytes": 1 << 30, "half_life": 16.0, **given}
            memory = OutputMemory(max_depth=max_depth, **given)
        elif given:
            raise ValueError(f"{min(given)}: expected None beside a memory, which has its own")
        require(OutputMemory, memory=memory)
        self.memory = memory
        drafter = SuffixDrafter(memory, max_depth, min_prob=min_prob, by_prompt=True)
        drafters = [drafter, *fallback_drafters(fallback, memory)]
        super().__init__(drafters, budget=budget, max_nodes=max_nodes, **options)


class RestAssistant(Preset):
    """Drafts from a corpus on disk, the most frequent continuations first (REST, He et al., 2023).

    As published it is `RestAssistant(datastore, sources=1, budget=64)` (sections 3.2 and 3.3). The
    other arguments are those of :class:`Assistant`.

    Args:
        datastore: of the model's tokenizer; or its path.
        max_match: the longest context looked up, in tokens.
        max_nodes: of a draft.
        continuation: tokens of a draft's longest path.
        sources: match lengths that draft: the longest one, then the next shorter ones.
    """

    @shows_arguments
    def __init__(
        self,
        datastore: Datastore | str | os.PathLike[str],
        max_match: int = 16,
        max_nodes: int = 64,
        continuation: int = 10,
        sources: int = 3,
        *,
        budget: Budget = "auto",
        **options: Unpack[Options],
    ):
        if isinstance(datastore, (str, os.PathLike)):
            datastore = Datastore.open(datastore)
        require(Datastore, datastore=datastore)
        self.datastore = datastore
        drafter = RestDrafter(datastore, max_match, max_nodes, continuation, sources)
        super().__init__([drafter], budget=budget, **options)


class SequoiaAssistant(Preset):
    """Drafts optimal trees of a small model (Sequoia, Chen et al., 2024).

    A tree's shape is solved by dynamic programming for the measured acceptance by rank (section
    4.1), its size for the measured times (section 4.3); with `budget=max_nodes` it is verified
    whole. The other arguments are those of :class:`Assistant`.

    Args:
        draft_model: a transformers model with the target's vocabulary.
        temperature: None drafts the draft model's most probable tokens, and generation keeps its
            seed. A number, for sampling: children are drawn without replacement at this
            temperature and verified by residual sampling, which keeps the distribution of the
            output but not the seed.
        max_nodes: of a draft.
        max_levels: forwards of the draft model for one draft.
        width: children of a node at most.

    Raises:
        ValueError: a bad size; from `generate`, another vocabulary than the target's.
    """

    @shows_arguments
    def __init__(
        self,
        draft_model: PreTrainedModel,
        temperature: float | None = None,
        max_nodes: int = 63,
        max_levels: int = 8,
        width: int = 8,
        *,
        budget: Budget = "auto",
        **options: Unpack[Options],
    ):
        require(torch.nn.Module, draft_model=draft_model)
        sizes = {"max_nodes": max_nodes, "max_levels": max_levels, "width": width}
        drafter = DraftModelDrafter(draft_model, temperature=temperature, **sizes)
        residual = temperature is not None
        super().__init__([drafter], budget=budget, residual=residual, **options)


# Whoever imports an assistant from here wants to hand it to `generate`.
give_generate_its_keyword()
