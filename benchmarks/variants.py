"""The assistants that the acceptance benchmark compares: presets, and presets less a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_retrieval_assist import Assistant, Datastore, OutputMemory, SamAssistant
from hf_retrieval_assist.drafters.base import Drafter
from hf_retrieval_assist.drafters.suffix import SuffixDrafter
from hf_retrieval_assist.papers import Rest, SamDecoding, SuffixDecoding
from hf_retrieval_assist.papers.sam_decoding import SamPolicy
from hf_retrieval_assist.policy.policy import DraftingPolicy

from .baselines import prompt_lookup
from .traces import Ids, Trace

Make = Callable[[], Assistant]
# The fingerprint under which `simulate` learns.
SIMULATED = "simulation"


def presets(trace: Trace, folder: Path) -> dict[str, Make]:
    """Everything a user would reach for, with what the trace lets it index beforehand."""
    found: dict[str, Make] = {
        "prompt lookup": prompt_lookup,
        "SamAssistant": SamAssistant,
        "SamAssistant, memory": lambda: SamAssistant(memory=OutputMemory()),
    }
    if trace.corpus:
        found["SamAssistant, corpus"] = lambda: SamAssistant(corpus=trace.corpus)
        found["SamAssistant, corpus, memory"] = lambda: SamAssistant(
            corpus=trace.corpus, memory=OutputMemory()
        )
        found["REST"] = _rest(trace, folder, trace.corpus)
    return found


class CorpusAlone(SamDecoding):
    """SAM-Decoding whose automaton over the text itself never gets to draft."""

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        _, *others = drafters
        return SamPolicy(others, [self.corpus_bias], self.min_match, **options)


def sam_parts(trace: Trace, folder: Path) -> dict[str, Make]:
    """The paper's table of ablations, under its own rule; a fallback's logits are not recorded."""
    alone = partial(SamDecoding, fallback=None)
    found: dict[str, Make] = {"the text's automaton": alone}
    if trace.corpus:
        found |= {
            "both automata": lambda: alone(trace.corpus),
            "the corpus's automaton": lambda: CorpusAlone(trace.corpus, fallback=None),
            "whole, planned": lambda: SamAssistant(corpus=trace.corpus),
        }
    return found


def suffix_settings(trace: Trace, folder: Path) -> dict[str, Make]:
    """The paper's alpha (nodes per matched token), and what each of the two trees brings."""
    found: dict[str, Make] = {
        f"alpha {alpha}": partial(SuffixDecoding, alpha=alpha) for alpha in (0.5, 1, 2, 4)
    }
    return found | {
        "alpha 4, the request's tree alone": lambda: SuffixDecoding().private(),
        "planned": lambda: SamAssistant(memory=OutputMemory(), fallback=None),
        "planned, with fallback": lambda: SamAssistant(memory=OutputMemory()),
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
    sizes = {"1/16 of the corpus": 16, "1/4 of the corpus": 4, "whole corpus": 1}
    for size, share in sizes.items():
        found[size] = _rest(trace, folder, trace.corpus[::share])
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
        return Rest(store, max_match)

    return make
