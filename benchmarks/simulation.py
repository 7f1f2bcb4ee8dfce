"""Replay recorded requests through an assistant, with a perfect verifier and no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hf_retrieval_assist.assistants import Assistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.feedback import RowFeedback
from hf_retrieval_assist.policy.account import Account
from hf_retrieval_assist.policy.cost_model import CostModel
from hf_retrieval_assist.policy.cost_store import CostKey
from hf_retrieval_assist.policy.policy import Ask, AssistantSession, DraftingPolicy, Outcome
from hf_retrieval_assist.system.arguments import require_at_least
from hf_retrieval_assist.types.token_tree import Ids, Limits, TokenTree, checked_ids
from hf_retrieval_assist.verification.verified import TopLogits


class KnownCost(CostModel):
    """A known t(n), `seconds(n)`, that learns nothing."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self._known = cache(seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        pass

    def timed(self, tokens: int) -> float:
        return float(self._known(tokens))

    def curve(self, max_tokens: int) -> NDArray[np.float64]:
        return np.array([self.timed(n) for n in range(1, 1 + max_tokens)])


@dataclass
class SimulationReport:
    """What a simulation counted.

    Attributes:
        steps: verification steps, each row of a batch counting its own.
        forwards: verification steps of whole batches; equal to `steps` for one row at a time.
        tokens: tokens of all outputs but the first of each.
        nodes: verified nodes.
        draft_seconds: spent proposing and planning.
        update_seconds: spent committing.
        cost: relative time of all forwards, in units of a plain one; None without t(n).
        plain_forwards: that plain decoding takes for the same batches.
    """

    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    nodes: int = 0
    draft_seconds: float = 0.0
    update_seconds: float = 0.0
    cost: float | None = None
    plain_forwards: int = 0

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per step, the bonus token included."""
        return self.tokens / max(self.steps, 1)

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / max(self.steps, 1)

    @property
    def draft_us(self) -> float:
        """Microseconds of drafting per step."""
        return 1e6 * self.draft_seconds / max(self.steps, 1)

    @property
    def update_us_per_token(self) -> float:
        """Microseconds of learning per output token."""
        return 1e6 * self.update_seconds / max(self.tokens, 1)

    @property
    def speedup(self) -> float | None:
        """Time of plain decoding over time of verification, at the given t(n)."""
        return None if self.cost is None else self.plain_forwards / max(self.cost, 1e-12)


def simulate(
    assistant: Assistant,
    requests: Iterable[tuple[Ids, Ids]],
    cost: Callable[[int], float] | None = None,
    vocab_size: int = 1 << 20,
    batch_size: int = 1,
) -> SimulationReport:
    """Replay requests in order, as if a model had produced exactly the recorded outputs.

    As in `generate`, an output's first token comes from the prefill and belongs to no step. Outputs
    are learnt from as they are replayed, by assistants that learn. Of the logits it is known which
    token came: drafters that learn from them are shown that alone.

    Args:
        assistant: its figures of calls are not touched, but what it learns stays.
        requests: (prompt ids, output ids) pairs.
        cost: n -> relative time of a forward over n tokens per row; the planner then works with it
            and the report tells the speedup.
        vocab_size: of the recorded ids.
        batch_size: requests that are replayed side by side as the rows of one batch, every forward
            of which is as wide as its widest row and which ends with its longest output.

    Raises:
        ValueError: an id outside the vocabulary, or a batch without rows.
        TypeError: ids that are no integers.
    """
    require_at_least(1, batch_size=batch_size)
    policy, model = assistant.policy, None if cost is None else KnownCost(cost)
    report = SimulationReport(cost=None if cost is None else 0.0)
    # Every simulation learns for itself: outputs of different recordings do not belong together.
    target = Target(vocab_size=vocab_size, fingerprint="simulation")
    account = None if model is None else policy.account(CostKey(target.fingerprint, "", "", ""))
    waiting = iter(requests)
    while batch := list(islice(waiting, batch_size)):
        rows: list[_Row] = []
        try:
            for request in batch:
                prompt, output = (checked_ids("requests", ids, vocab_size) for ids in request)
                rows.append(_Row(policy.start(prompt, target), output))
            _replay(policy, rows, model, report, account)
        finally:
            for row in rows:
                row.session.close()
    return report


@dataclass
class _Row:
    """A recorded output and how much of it has been replayed."""

    session: AssistantSession
    output: NDArray[np.int32]
    done: int = 1

    @property
    def left(self) -> int:
        return max(len(self.output) - self.done, 0)

    def follow(self, tree: TokenTree) -> list[int]:
        """The tokens of a step that verifies a tree."""
        accepted = tree.follow(self.output[self.done :])
        tokens = self.output[self.done : self.done + 1 + len(accepted)].tolist()
        self.done += len(tokens)
        return tokens


def _replay(
    policy: DraftingPolicy,
    rows: Sequence[_Row],
    cost: CostModel | None,
    report: SimulationReport,
    account: Account | None,
) -> None:
    """Replay the rows of one batch in lockstep."""
    for row in rows:
        if len(row.output):
            row.session.begin(row.output[:1].tolist())
    report.plain_forwards += max(row.left for row in rows)
    while running := [row for row in rows if row.left]:
        started = time.perf_counter()
        limits = partial(Limits, [row.left - 1 for row in running])
        step = policy.draft(Ask([row.session for row in running], cost, account, limits=limits))
        report.draft_seconds += time.perf_counter() - started
        tokens = [row.follow(tree) for row, tree in zip(running, step.trees, strict=True)]
        shown = _shown(running, tokens, policy.top_k)
        outcomes = [
            Outcome(row.session, *brought)
            for row, *brought in zip(running, tokens, step.trees, shown, strict=True)
        ]
        sizes = [len(tree) for tree in step.trees]
        fed = 1 + max(sizes)
        learning = time.perf_counter()
        policy.learn(step, outcomes, fed)
        report.update_seconds += time.perf_counter() - learning
        report.forwards += 1
        report.steps += len(running)
        report.nodes += sum(sizes)
        report.tokens += sum(len(outcome.tokens) for outcome in outcomes)
        if cost is not None and report.cost is not None:
            report.cost += cost.seconds(fed) / cost.seconds(1)


def _shown(
    rows: Sequence[_Row], tokens: Sequence[Sequence[int]], top_k: int
) -> Iterator[RowFeedback | None]:
    """What the forward of a step has shown of each row: behind each token that came, the next one.

    Args:
        rows: after the step.
        tokens: that it brought to each.
        top_k: how many of the largest logits drafters learn from; 0: none do.
    """
    if not top_k:
        yield from [None] * len(rows)
        return
    came = [token for some in tokens for token in some]
    ids, logits = np.full((len(came), top_k), -1), np.full((len(came), top_k), -np.inf, np.float32)
    ids[:, 0], logits[:, 0] = came, 0.0
    first = 0
    for row, some in zip(rows, tokens, strict=True):
        chain = np.arange(len(some), dtype=np.int32)
        fed = row.output[row.done - len(some) - 1 : row.done - 1]
        yield RowFeedback(fed, chain, chain - 1, top=TopLogits(logits, first + chain, ids))
        first += len(some)
