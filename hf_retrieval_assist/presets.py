"""The assistant that people use."""

from __future__ import annotations

import os
from typing import Any, Unpack

from . import give_generate_its_keyword
from .assistants import Assistant
from .corpus.datastore import Datastore
from .corpus.readers import Corpus, tokenised
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


def require(kind: type, **arguments: Any) -> None:
    """TypeError where an argument is of another kind."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            named = kind is OutputMemory and isinstance(value, (str, os.PathLike))
            hint = f"; write OutputMemory(path={str(value)!r})" if named else ""
            raise TypeError(f"{name}: expected {kind.__name__}, got {kind_of(value)}{hint}")


class SamAssistant(Assistant):
    """Drafts from suffix trees of the text, a memory and a corpus, mixed by their worth.

        assistant = SamAssistant(corpus=["Terms and conditions ..."], tokenizer=tokenizer)
        model.generate(**inputs, assistant=assistant)
        print(assistant.stats)

    The sources are those of SAM-Decoding and SuffixDecoding, whose own rules are in
    :mod:`~hf_retrieval_assist.papers`. A `Datastore` drafts beside the trees. The other arguments
    are those of :class:`Assistant`.

    Args:
        corpus: documents, indexed once, in memory: texts, rows of a data set with a "text", or
            sequences of token ids. Or the path of a text file or of a folder of them, or
            "datasets:NAME". Or a `Datastore`, or its path.
        fallback: "auto", logit n-grams and, where it can draft and pays, "quantized_self", the
            target itself with weights in few bits, for which it packs a copy of them as far as
            `extra_memory` allows; "logit_ngrams" alone; "mtp", the target's own
            multi-token-prediction layers; the folder of a published head; a draft model of the same
            tokenizer; a DFlash model; an `EagleHead`; a drafter; None. Or a list of these, whose
            drafts become one tree.
        memory: earlier outputs to draft from, and to teach; None learns nothing.
        tokenizer: of the model; for a corpus of texts.
        budget: nodes that a step verifies: "auto", as many as pay for themselves by measured
            costs; or a number.

    Raises:
        ValueError: a bad size or an empty corpus; texts without a tokenizer; from `generate`, a
            corpus id outside the model's vocabulary.
        TypeError: an argument of another kind than said.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        fallback: Fallback = "auto",
        memory: OutputMemory | None = None,
        *,
        tokenizer: Any = None,
        budget: Budget = "auto",
        **options: Unpack[Options],
    ):
        self.memory, self._told = memory, _told(corpus, fallback)
        if corpus is not None:
            corpus = tokenised(corpus, tokenizer)
        learn = memory is not None
        if learn:
            require(OutputMemory, memory=memory)
        sources: list[Drafter]
        if isinstance(corpus, Datastore):
            longest = {"max_nodes": _LONGEST_DRAFT, "continuation": _LONGEST_DRAFT}
            sources = [SuffixDrafter(memory, learn=learn), RestDrafter(corpus, **longest)]
        else:  # one drafter for the text, the memory and the corpus
            sources = [SuffixDrafter(memory, corpus=corpus, learn=learn)]
        sources += fallback_drafters(fallback, memory)
        super().__init__(sources, budget=budget, **options)

    def _arguments(self) -> str:
        """The sources, as in a call."""
        memory = [] if self.memory is None else [f"memory={self.memory!r}"]
        return ", ".join([*self._told, *memory])


def _told(corpus: Any, fallback: Any) -> list[str]:
    """The corpus and the fallback as `repr` shows them, where they are no defaults."""
    told = []
    if isinstance(corpus, (str, os.PathLike, Datastore)):
        told = [f"corpus={corpus!r}"]
    elif corpus is not None:
        count = f"{len(corpus):,} " if hasattr(corpus, "__len__") else ""
        told = [f"corpus=<{count}document{'s' * (count != '1 ')}>"]
    if not isinstance(fallback, str) or fallback != "auto":
        several = isinstance(fallback, (list, tuple))
        shown = ", ".join(map(_shown, fallback if several else [fallback]))
        told.append(f"fallback=[{shown}]" if several else f"fallback={shown}")
    return told


def _shown(fallback: Any) -> str:
    plain = fallback is None or isinstance(fallback, (str, os.PathLike))
    return repr(fallback) if plain else f"<{type(fallback).__name__}>"


# Whoever imports an assistant from here wants to hand it to `generate`.
give_generate_its_keyword()
