"""Replay recorded requests through an assistant, with a perfect verifier and no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .assistants import Assistant, AssistantSession
from .drafters.base import Target
from .planning.cost_model import CostModel

Tokens = Sequence[int] | NDArray[np.integer]


@dataclass
class SimulationReport:
    """What a simulation counted.

    Attributes:
        steps: verification steps.
        tokens: tokens of all outputs but the first of each.
        nodes: verified nodes.
        draft_seconds: spent proposing and planning.
        update_seconds: spent committing.
        cost: relative time of all verification steps, in units of a plain step; None without t(n).
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    draft_seconds: float = 0.0
    update_seconds: float = 0.0
    cost: float | None = None

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
        return None if self.cost is None else self.tokens / max(self.cost, 1e-12)

    def __str__(self) -> str:
        speedup = "" if self.speedup is None else f", {self.speedup:.2f}x"
        return (
            f"{self.mean_accepted_tokens:.2f} tokens/step, {self.nodes_per_step:.1f} nodes/step, "
            f"draft {self.draft_us:.0f} us/step, update {self.update_us_per_token:.1f} us/token"
            f"{speedup} ({self.tokens} tokens in {self.steps} steps)"
        )


def simulate(
    assistant: Assistant,
    requests: Iterable[tuple[Tokens, Tokens]],
    cost: Callable[[int], float] | None = None,
    vocab_size: int = 2**31 - 1,
) -> SimulationReport:
    """Replay requests in order, as if a model had produced exactly the recorded outputs.

    As in `generate`, an output's first token comes from the prefill and belongs to no step. Outputs
    are learnt from as they are replayed, by assistants that learn; there are no logits to learn
    from.

    Args:
        assistant: its statistics are not touched, but what it learns stays.
        requests: (prompt ids, output ids) pairs.
        cost: n -> relative time of a forward over n tokens; the planner then works with it and
            the report tells the speedup.
        vocab_size: of the recorded ids.

    Raises:
        ValueError: an id outside the vocabulary.
        TypeError: ids that are no integers.
    """
    model = None if cost is None else CostModel.fixed(cost)
    report = SimulationReport(cost=None if cost is None else 0.0)
    # Every simulation learns for itself: outputs of different recordings do not belong together.
    target = Target(vocab_size=vocab_size, fingerprint="simulation")
    for prompt, output in requests:
        prompt_ids, output_ids = _checked(prompt, vocab_size), _checked(output, vocab_size)
        session = assistant.start(prompt_ids, target)
        try:
            if not len(output_ids):
                continue
            _replay(assistant, session, output_ids, model, report)
        finally:
            session.close()
    return report


def _replay(
    assistant: Assistant,
    session: AssistantSession,
    output: NDArray[np.int32],
    cost: CostModel | None,
    report: SimulationReport,
) -> None:
    done = 1
    session.begin(output[:done].tolist())
    while done < len(output):
        started = time.perf_counter()
        proposal = session.propose(len(output) - done - 1, cost)
        tree = assistant.plan([proposal], cost)[0]
        proposed = time.perf_counter()
        tokens = output[done : done + 1 + len(tree.follow(output[done:]))]
        committing = time.perf_counter()
        session.commit(tokens.tolist(), None)
        report.update_seconds += time.perf_counter() - committing
        report.draft_seconds += proposed - started
        report.steps += 1
        report.nodes += len(tree)
        report.tokens += len(tokens)
        done += len(tokens)
        if cost is not None and report.cost is not None:
            report.cost += cost.seconds(1 + len(tree)) / cost.seconds(1)


def _checked(tokens: Tokens, vocab_size: int) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"requests: expected integer token ids, got {ids.dtype}")
    if ids.ndim != 1 or (len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size)):
        raise ValueError(
            f"requests: expected token ids in [0, {vocab_size}), got shape {ids.shape}"
            + (f" with ids up to {ids.max()}" if ids.size else "")
        )
    return ids.astype(np.int32)
