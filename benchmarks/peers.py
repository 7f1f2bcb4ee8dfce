"""Two published drafters that need no training beside ours: tokens per forward at equal nodes.

Counts alone, on prompts that nothing was tuned on and on the demo's tasks, with assistants that are
new for each prompt. Both drafters follow the rules and parameters of their papers.

RACER (Zhang et al. 2026, https://arxiv.org/abs/2604.14885) joins what followed the text's last
tokens where they stood before with a tree that is grown from remembered logits. AdaPLD (Liu et al.
2026, https://arxiv.org/abs/2606.05742) is prompt lookup that finds its place, the anchor, by hidden
states, and by tokens of like embedding where no token of the text is the last one.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_retrieval_assist import Assistant, SamAssistant, TokenTree
from hf_retrieval_assist.drafters.base import (
    Drafter,
    DraftSession,
    Feedback,
    FeedbackNeeds,
    Feedbacks,
    Target,
    Tokens,
)
from hf_retrieval_assist.drafters.logit_ngrams import LogitNgramDrafter
from hf_retrieval_assist.papers import TokenRecycling
from hf_retrieval_assist.tools.demo.comparison import TASKS
from hf_retrieval_assist.types.evidence import EvidenceClasses

from .inputs import UNTUNED, Prompt, load, model_name, read_prompts
from .methods import Method, assisted, prompt_lookup
from .report import Report
from .spec_bench import COLUMNS, measure

Path = tuple[int, ...]

GRAM = 10  # tokens of RACER's patterns
SHORTEST = 2  # tokens of its matches at least
BREADTH = 8  # likeliest tokens that both remember
COPIED = 30  # tokens that AdaPLD copies at most
ALIKE = 0.1  # cosine from which a token's embedding is like another's

# How often AdaPLD's nodes are right where their parents are, measured with Gemma-3-270M on
# `prompts/*.json`, which are not in the comparison: the first token copied, a later one; by rank
# what the anchor's logits name, beside a copy and where there is none; a token after those.
_FIRST, _LATER, _BESIDE, _ALONE, _AFTER = 0, 1, 2, 2 + BREADTH, 2 + 2 * BREADTH
_RATES = np.array(
    [
        *(0.79, 0.95),
        *(0.12, 0.04, 0.02, 0.016, 0.01, 0.009, 0.008, 0.006),
        *(0.08, 0.05, 0.03, 0.012, 0.01, 0.008, 0.006, 0.005),
        0.5,
    ],
    dtype=np.float32,
)


def methods(nodes: int, model: Any) -> list[Method]:
    """What is compared; drafts of all but plain decoding have at most `nodes` nodes."""
    layer = model.config.get_text_config().num_hidden_layers // 2

    def beside(*others: Drafter) -> Assistant:
        return SamAssistant(fallback=["logit_ngrams", *others], budget=nodes)

    return [
        Method("plain", dict),
        prompt_lookup(nodes),
        assisted("RACER", lambda: Assistant([RacerDrafter()], budget=nodes)),
        assisted("AdaPLD", lambda: Assistant([AdaPldDrafter(layer)], budget=nodes)),
        assisted("Token Recycling", lambda: Assistant([TokenRecycling()], budget=nodes)),
        assisted("logit n-grams", lambda: Assistant([LogitNgramDrafter()], budget=nodes)),
        assisted("retrieval alone", partial(SamAssistant, fallback=None, budget=nodes)),
        assisted("SamAssistant", beside),
        assisted("SamAssistant and AdaPLD", lambda: beside(AdaPldDrafter(layer))),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers-prompts", type=int, default=12, help="unseen ones")
    parser.add_argument("--peers-nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--peers-tokens", type=int, default=48, help="to generate per prompt")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the model")
    model, tokenizer = load(arguments)
    count, tokens, sizes = (
        arguments.peers_prompts,
        arguments.peers_tokens,
        arguments.peers_nodes,
    )
    tasks = [Prompt("the demo's tasks", task.title, task.prompt) for task in TASKS]
    if arguments.quick:
        count, tokens, sizes, tasks = 1, 12, [8], tasks[:1]
    report = Report("peers", {"model": model_name(arguments), "new_tokens": tokens})
    table = report.table("Peers", COLUMNS | {"nodes": "nodes"})
    unseen = read_prompts(UNTUNED)
    # Each kind has as many as there can be.
    spread = [unseen[i * len(unseen) // count] for i in range(count)]
    prompts = [replace(prompt, category="untuned") for prompt in spread] + tasks
    for nodes in sizes:
        known = len(table.rows)
        measure(table, model, tokenizer, prompts, methods(nodes, model), tokens, progress)
        for row in table.rows[known:]:
            row["nodes"] = nodes
    return report


class RacerDrafter(Drafter):
    """RACER, whose automaton holds all of these short texts and is rebuilt after every token."""

    name = "racer"
    needs = FeedbackNeeds(top_k=BREADTH)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        model = target.require_model("RACER")
        # A prefill computes the last logits alone, while the paper learns from all of them.
        states = model.get_decoder()(torch.from_numpy(prompt_ids)[None].long()).last_hidden_state
        prompt = prompt_ids.tolist()
        known = dict(zip(prompt, likeliest(model, states[0]), strict=True))
        return RacerSession(prompt, known, target.vocab_size)

    def propose(
        self, sessions: Sequence[RacerSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        return [one.draft(budget) for one, budget in zip(sessions, budgets, strict=True)]

    def commit(
        self, sessions: Sequence[RacerSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            session.append(token_ids, feedback)


class RacerSession(DraftSession):
    """The patterns of one text, and what was likeliest after each token when it was last fed."""

    def __init__(self, prompt: Sequence[int], known: dict[int, list[int]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._text: list[int] = []
        self._counts: Counter[Path] = Counter()
        self._following: dict[Path, list[int]] = {}
        self._likeliest = known
        self._append(prompt)

    def append(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        """The text went on with these tokens, of which a forward has shown this."""
        if feedback is not None and feedback.top is not None:
            nodes = np.arange(len(feedback.token_ids))
            rows = feedback.top.of(nodes, BREADTH, self._vocab_size)[0].tolist()
            self._likeliest.update(zip(feedback.token_ids.tolist(), rows, strict=True))
        self._append(token_ids)

    def _append(self, token_ids: Iterable[int]) -> None:
        """Count all beginnings of each pattern that a token completes."""
        for token in token_ids:
            self._text.append(token)
            if len(self._text) >= GRAM:
                for gram in accumulate((token,) for token in self._text[-GRAM:]):
                    if gram not in self._counts:
                        self._following.setdefault(gram[:-1], []).append(gram[-1])
                    self._counts[gram] += 1

    def draft(self, budget: int) -> TokenTree:
        """Retrieved paths, then remembered logits; `budget` nodes at most."""
        paths = dict.fromkeys(self._retrieved()[:budget], 1.0)
        self._fill(paths, budget)
        return tree_of(paths)

    def _retrieved(self) -> list[Path]:
        """What followed the ends of the text, the most frequent first, and of equals the shallowest
        in the automaton: each path behind the one that it continues."""
        found = []
        for length in range(SHORTEST, min(GRAM, len(self._text) + 1)):
            waiting = [tuple(self._text[-length:])]
            while waiting:
                gram = waiting.pop()
                longer = [(*gram, token) for token in self._following.get(gram, ())]
                found += [(-self._counts[gram], len(gram), gram[length:]) for gram in longer]
                waiting += longer
        found.sort(key=lambda one: one[:2])
        return list(dict.fromkeys(path for *_, path in found))

    def _fill(self, paths: dict[Path, float], budget: int) -> None:
        """Add a tree of remembered logits, level by level, until there are `budget` nodes.

        The likeliest child of the root may have as many children as the root, that of another node
        half as many as the node; each sibling half as many as the one before it, at least one.
        """
        waiting: deque[tuple[Path, int]] = deque([((), BREADTH)])
        while waiting:
            path, breadth = waiting.popleft()
            most = breadth // 2 if path else breadth
            token = path[-1] if path else self._text[-1]
            for rank, child in enumerate(self._likeliest.get(token, [])[:breadth]):
                longer = (*path, child)
                if longer not in paths and len(paths) >= budget:
                    return
                paths[longer] = 1.0
                waiting.append((longer, max(1, most >> rank)))


class AdaPldDrafter(Drafter):
    """AdaPLD; of what it would draft, the nodes are taken whose like was right the most often.

    Args:
        layer: before which hidden states are compared; the paper chose one for each model.
    """

    name = "adapld"
    evidence = EvidenceClasses(_RATES)

    def __init__(self, layer: int) -> None:
        self.needs = FeedbackNeeds(hidden_layers=(layer, -1))

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        return AdaPldSession(prompt_ids, target.require_model("AdaPLD"))

    def propose(
        self, sessions: Sequence[AdaPldSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        return [one.draft(budget) for one, budget in zip(sessions, budgets, strict=True)]

    def commit(
        self, sessions: Sequence[AdaPldSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            session.append(token_ids, feedback)


class AdaPldSession(DraftSession):
    """A text, and of each of its tokens but the last, which was not fed yet, its hidden states."""

    def __init__(self, prompt: NDArray[np.int32], model: Any) -> None:
        self._text = prompt
        self._model = model
        self._embeddings = model.get_input_embeddings().weight
        self._states = torch.empty(0)

    def append(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        """The text went on with these tokens; ValueError without their hidden states."""
        if feedback is None or feedback.hidden_states is None:
            raise ValueError("AdaPLD: expected hidden states, got none (a simulation)")
        self._states = torch.cat([self._states, feedback.hidden_states])
        self._text = np.append(self._text, np.asarray(token_ids, np.int32))

    def draft(self, budget: int) -> TokenTree:
        """What stood behind the place that is most alike; `budget` nodes at most."""
        states, last = self._states.chunk(2, dim=-1)
        anchor, equal = self._anchor(int(self._text[-1]), states[-1])
        if anchor < 0:
            return TokenTree.empty()
        copied = self._text[anchor + 1 :][:COPIED].tolist() if equal else []
        grams = accumulate((token,) for token in copied)
        classes = {path: _FIRST if len(path) == 1 else _LATER for path in grams}
        for rank, token in enumerate(likeliest(self._model, last[anchor])):
            if token not in copied[:1]:
                classes[(token,)] = (_BESIDE if equal else _ALONE) + rank
                place, _ = self._anchor(token, states[anchor])
                if place >= 0:
                    classes[token, int(self._text[place + 1])] = _AFTER
        rates = {path: float(_RATES[kind]) for path, kind in classes.items()}
        return tree_of(rates, list(classes.values())).prune(budget)

    def _anchor(self, token: int, before: torch.Tensor) -> tuple[int, bool]:
        """Where `token` stood, or one like it, behind the state that is nearest to `before`.

        Returns:
            the place, −1 where there is none, and whether the token itself stands there.
        """
        text = self._text[1:-1]
        alike = text == token
        equal = bool(alike.any())
        if not equal:
            alike = cosines(self._embeddings[text], self._embeddings[token]) >= ALIKE
        places = np.flatnonzero(alike)
        if not len(places):
            return -1, False
        states = self._states.chunk(2, dim=-1)[0]
        return 1 + int(places[cosines(states[places], before).argmax()]), equal


@torch.no_grad()
def likeliest(model: Any, states: torch.Tensor) -> Any:
    """The tokens that follow last hidden states [..., width] most likely: lists [..., BREADTH]."""
    return model.get_output_embeddings()(states).topk(BREADTH).indices.tolist()


def cosines(rows: torch.Tensor, vector: torch.Tensor) -> NDArray[np.float32]:
    """float32 [n], of each of the rows [n, width] with a vector [width]."""
    found: NDArray[np.float32]
    found = torch.cosine_similarity(rows.float(), vector.float()[None]).detach().numpy()
    return found


def tree_of(rates: dict[Path, float], classes: Sequence[int] | None = None) -> TokenTree:
    """Paths from the root as nodes, each behind the one that it continues.

    Args:
        rates: how often each is right where the one that it continues is.
    """
    places, probs = {(): -1}, {(): 1.0}
    for path, rate in rates.items():
        places[path] = len(places) - 1
        probs[path] = probs[path[:-1]] * rate
    parents = [places[path[:-1]] for path in rates]
    return TokenTree.build(
        [path[-1] for path in rates], parents, [probs[path] for path in rates], classes
    )
