"""What an assistant did: counts and seconds, for one call and in total."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from .planning.acceptance import Calibrator, Reliability

PHASES = ("draft", "forward", "walk", "cache")


@dataclass
class CallStats:
    """Figures of one call to `generate`, or the sum over several.

    Attributes:
        tier: how drafts were verified: tree, chain, replay or plain; "at rest" where a call was
            decoded plainly because drafts had made calls like it slower.
        calls: calls summed up here.
        steps: forwards after the prefill, per row that was running.
        forwards: the same, rows of one forward counted once.
        tokens: generated tokens, all rows together.
        drafted: verified nodes.
        accepted: nodes that became tokens.
        expected_accepted: tokens of the texts given to `Assistant.expecting` that came out, summed
            over rows.
        expected_rejected: the others of them.
        keeps_seed: whether sampled tokens are those of plain decoding under the same seed. Residual
            sampling draws otherwise, as do rows of a batch that get on at their own pace where
            random numbers cannot be told beforehand, from the same distributions.
        seconds: wall clock per phase: draft (propose, plan and commit), forward, walk (choosing
            tokens) and cache (keeping the accepted path); prefill; pack (rounding weights to eight
            bits, once for each model); `total` is the whole call.
    """

    tier: str = ""
    calls: int = 0
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    expected_accepted: int = 0
    expected_rejected: int = 0
    keeps_seed: bool = True
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*PHASES, "prefill", "pack", "total"), 0.0)
    )

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per forward, the one that plain decoding would have brought included.

        The first token of a call comes from the prefill, and is not counted.
        """
        return (self.tokens - self._from_prefill) / self.steps if self.steps else 0.0

    @property
    def nodes_per_step(self) -> float:
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def _from_prefill(self) -> int:
        return self.tokens - self.accepted - self.steps

    def count_step(self, drafted: int, accepted: int) -> None:
        """Count one row's part of a forward."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    def count_expected(self, accepted: int, rejected: int) -> None:
        """Count what one row brought of the texts that were expected."""
        self.expected_accepted += accepted
        self.expected_rejected += rejected

    def count_plain(self, lengths: Sequence[int]) -> None:
        """Count a call that was decoded plainly, whose rows were given so many tokens each: the
        first by the prefill, every other one by a forward."""
        self.tokens = sum(lengths)
        self.steps = self.tokens - len(lengths)
        self.forwards = max(lengths) - 1

    def add(self, other: CallStats) -> None:
        """Add another call's figures to these."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            elif isinstance(mine, bool):
                setattr(self, item.name, mine and theirs)
            elif isinstance(mine, int):
                setattr(self, item.name, mine + theirs)
            else:
                setattr(self, item.name, theirs or mine)

    def __str__(self) -> str:
        expected = self.expected_accepted + self.expected_rejected
        came = f"{self.expected_accepted} of {expected} expected tokens came; " if expected else ""
        share = " ".join(f"{name} {1e3 * self.seconds[name]:.0f}" for name in PHASES)
        return (
            f"{self.tokens} tokens in {self.steps} steps ({self.tier or 'no call yet'}): "
            f"{self.mean_accepted_tokens:.2f} tokens/step, {self.nodes_per_step:.1f} nodes/step, "
            f"{self.accepted} of {self.drafted} accepted; {came}"
            f"{self.seconds['total']:.2f} s "
            f"(ms: prefill {1e3 * self.seconds['prefill']:.0f} {share})"
        )


class Stats:
    """`assistant.stats`: the last call, the total, and how predictions held.

    Args:
        names: of the drafters.
        calibrators: by model, one of each drafter.
    """

    def __init__(self, names: Sequence[str], calibrators: Mapping[str, Sequence[Calibrator]]):
        self.last = CallStats()
        self.total = CallStats()
        self._names = names
        self._calibrators = calibrators

    @property
    def reliability(self) -> dict[str, Reliability]:
        """Drafter -> predicted against observed acceptance of its nodes, for all models."""
        models = list(self._calibrators.values())
        return {
            name: Reliability.total(model[number].reliability() for model in models)
            for number, name in enumerate(self._names)
        }

    @property
    def tier(self) -> str:
        return self.last.tier

    def record(self, call: CallStats) -> None:
        self.last = call
        self.total.add(call)

    def __repr__(self) -> str:
        lines = [f"last call: {self.last}", f"{self.total.calls} calls: {self.total}"]
        for name, found in self.reliability.items():
            if found.trials.sum():
                lines.append(
                    f"{name}: expected {found.predicted.sum():.0f} and observed "
                    f"{found.observed.sum():.0f} acceptances of {found.trials.sum():.0f} nodes"
                )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        calls = [("last call", self.last), (f"{self.total.calls} calls", self.total)]
        rows = [_html_row("th", "", *_HTML_COLUMNS)]
        rows += [_html_row("td", title, *_html_cells(call)) for title, call in calls]
        return f"<table>{''.join(rows)}</table>"


_HTML_COLUMNS = ("tier", "tokens", "steps", "tokens/step", "nodes/step", "seconds", "in forward")


def _html_cells(call: CallStats) -> tuple[str, ...]:
    total, forward = call.seconds["total"], call.seconds["forward"] + call.seconds["prefill"]
    return (
        call.tier,
        f"{call.tokens:,}",
        f"{call.steps:,}",
        f"{call.mean_accepted_tokens:.2f}",
        f"{call.nodes_per_step:.1f}",
        f"{total:.2f}",
        f"{forward / total:.0%}" if total else "",
    )


def _html_row(tag: str, *cells: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
