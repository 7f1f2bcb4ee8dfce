"""The assistants that the acceptance benchmark compares: presets, and presets less a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_retrieval_assist import (
    Assistant,
    Datastore,
    OutputMemory,
    RestAssistant,
    SamAssistant,
    SuffixAssistant,
    TokenTree,
)
from hf_retrieval_assist.drafters.base import DraftSession
from hf_retrieval_assist.drafters.suffix import SuffixDrafter
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.papers import SamDecoding, SuffixDecoding
from hf_retrieval_assist.policy.policy import union

from .baselines import prompt_lookup
from .traces import Ids, Trace

Make = Callable[[], Assistant]
# The fingerprint under which `simulate` learns.
SIMULATED = "simulation"


def presets(trace: Trace, folder: Path) -> dict[str, Make]:
    """Everything a user would reach for, with what the trace lets it index beforehand."""
    found: dict[str, Make] = {
        "prompt lookup": prompt_lookup,
        "token recycling": lambda: Assistant([TokenRecyclingDrafter()]),
        "SamAssistant": SamAssistant,
        "SamAssistant, memory": lambda: SamAssistant(memory=OutputMemory()),
        "SuffixAssistant": SuffixAssistant,
    }
    if trace.corpus:
        found["SamAssistant, corpus"] = lambda: SamAssistant(corpus=trace.corpus)
        found["SamAssistant, corpus, memory"] = lambda: SamAssistant(
            corpus=trace.corpus, memory=OutputMemory()
        )
        found["RestAssistant"] = _rest(trace, folder, trace.corpus)
    return found


class CorpusAlone(SamDecoding):
    """SAM-Decoding whose automaton over the text itself never gets to draft."""

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        corpus: Any = sessions[1]
        if corpus.match_length - self.corpus_bias >= self.min_match:
            return drafts[1]
        return union(drafts[2:])


def sam_parts(trace: Trace, folder: Path) -> dict[str, Make]:
    """The paper's table of ablations, under its own rule."""
    found: dict[str, Make] = {
        "without corpus": SamDecoding,
        "without corpus and fallback": partial(SamDecoding, fallback=None),
    }
    if trace.corpus:
        found |= {
            "whole": lambda: SamDecoding(trace.corpus),
            "without fallback": lambda: SamDecoding(trace.corpus, fallback=None),
            "without the text's own automaton": lambda: CorpusAlone(trace.corpus),
            "whole, planned": lambda: SamAssistant(corpus=trace.corpus),
        }
    return found


def suffix_settings(trace: Trace, folder: Path) -> dict[str, Make]:
    """The paper's alpha (nodes per matched token), and what each of the two trees brings."""
    paper = partial(SuffixDecoding, fallback=None)
    found: dict[str, Make] = {
        f"alpha {alpha}": partial(paper, alpha=alpha) for alpha in (0.5, 1, 2, 4)
    }
    bare = partial(SuffixAssistant, fallback=None)
    return found | {
        "alpha 4, the request's tree alone": lambda: Assistant(
            [SuffixDrafter(alpha=4, scored=True, learn=False)], budget=4 * 64
        ),
        # No match in a tree of depth 1 leaves room for a draft.
        "alpha 4, the outputs' tree alone": partial(paper, alpha=4, max_depth=1),
        "planned": bare,
        "planned, with fallback": SuffixAssistant,
        "planned, paths instead of trees": partial(bare, tree=False),
        "planned, without earlier outputs": lambda: Assistant([SuffixDrafter(learn=False)]),
    }


def warmed(outputs: Iterable[Ids]) -> OutputMemory:
    """A memory that has learnt these outputs, as outputs of what `simulate` simulates."""
    memory = OutputMemory()
    for output in outputs:
        memory.add(output, SIMULATED)
    return memory


def rest_sizes(trace: Trace, folder: Path) -> dict[str, Make]:
    """REST's tables 2 and 3: more corpus, and longer matches (its n_max)."""
    if not trace.corpus:
        return {}
    found = {}
    for share in (16, 4, 1):
        part = trace.corpus[::share]
        found[f"1/{share} of the corpus" if share > 1 else "whole corpus"] = _rest(
            trace, folder, part
        )
    for longest in (2, 4, 8):
        found[f"matches up to {longest}"] = _rest(trace, folder, trace.corpus, longest)
    return found


def _rest(trace: Trace, folder: Path, corpus: list[Ids], max_match: int = 16) -> Make:
    """A maker of assistants over a datastore that is built when first asked for."""
    path = folder / f"{trace.name}-{len(corpus)}"

    def make() -> Assistant:
        if path.exists():
            store = Datastore.open(path)
        else:
            store = Datastore.build(corpus, path, vocab_size=trace.vocab_size, progress=False)
        return RestAssistant(store, max_match)

    return make
