"""What an assistant did: counts and seconds, for one call and in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ..system.locks import Lock

PHASES = ("draft", "forward", "walk", "cache")
FEWEST_STEPS = 4  # steps without drafts, in calls that tell how much faster they are
_SAID_ONCE = 0.05, 0.1  # share of the time, and seconds, that what is done once is spoken of from


@dataclass
class CallStats:
    """Figures of one call to `generate`, or the sum over several.

    Attributes:
        tier: how drafts were verified: tree, chain, replay or plain.
        reason: why the call was decoded plainly, or drafts ended before it did.
        attention: what computed attention in the forwards that verified: an implementation of
            transformers', or "triton".
        calls: calls summed up here.
        steps: forwards after the prefill, per row that was running.
        forwards: the same, rows of one forward counted once; requests of continuous batching count
            theirs each.
        repeated: of these, repeated from a recording.
        recordings: that were made; what earlier calls have made is used again.
        saved_forwards: that plain decoding would have needed besides.
        tokens: generated tokens, all rows together.
        read_before: tokens of prompts that were not read, since earlier calls had read them.
        why_unread: why the call could take nothing of `prefixes`, nor leave anything; empty where
            it could.
        drafted: verified nodes.
        accepted: nodes that became tokens.
        expected_accepted: tokens of the texts given to `Assistant.expecting` that came out, summed
            over rows.
        expected_rejected: the others of them.
        saved_seconds: what steps without drafts would have taken, at the time of those that calls
            like this one have taken, less what the steps took; negative where they were slower, 0
            where none was timed.
        compared_seconds: of `total`, all but `test` and `pack`, in calls that have `saved_seconds`.
        keeps_seed: whether sampled tokens are those of plain decoding under the same seed. Residual
            sampling draws otherwise, as do rows of a batch that get on at their own pace where
            random numbers cannot be told beforehand, from the same distributions.
        seconds: wall clock per phase: draft (propose, plan and commit), forward, walk (choosing
            tokens) and cache (keeping the accepted path). Before them `test`, which finds out how
            the model is served and takes time in its first calls, and `prefill`; between them
            `pack` (rounding weights to eight bits, once for each model). `total` is the whole call,
            or a request's share of the steps of continuous batching.
    """

    tier: str = ""
    reason: str = ""
    attention: str = ""
    calls: int = 0
    steps: int = 0
    forwards: int = 0
    repeated: int = 0
    recordings: int = 0
    saved_forwards: int = 0
    tokens: int = 0
    read_before: int = 0
    why_unread: str = ""
    drafted: int = 0
    accepted: int = 0
    expected_accepted: int = 0
    expected_rejected: int = 0
    saved_seconds: float = 0.0
    compared_seconds: float = 0.0
    keeps_seed: bool = True
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("test", "prefill", *PHASES, "pack", "total"), 0.0)
    )

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per forward after the prefill, which brings the first token; as papers count."""
        return (self.tokens - self._from_prefill) / self.steps if self.steps else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of a row per forward, the prefill among them: 1 is plain decoding."""
        made = self.steps + self._from_prefill
        return self.tokens / made if made else 0.0

    @property
    def undrafted_seconds(self) -> float:
        """What the calls in `compared_seconds` would have taken without drafts, with all that is no
        step as it was: an estimate."""
        return self.compared_seconds + self.saved_seconds

    @property
    def once_seconds(self) -> float:
        """What is done once for a model, a part of `total`."""
        return self.seconds["test"] + self.seconds["pack"]

    @property
    def nodes_per_step(self) -> float:
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def _from_prefill(self) -> int:
        return self.tokens - self.accepted - self.steps

    def count_seconds(self, **phases: float) -> None:
        """Count what phases took."""
        for phase, seconds in phases.items():
            self.seconds[phase] += seconds

    def count_steps(self, rows: int, drafted: int, accepted: int) -> None:
        """Count the parts that rows had in a forward."""
        self.steps += rows
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
            elif isinstance(mine, (int, float)):
                setattr(self, item.name, mine + theirs)
            else:
                setattr(self, item.name, theirs or mine)

    @property
    def summary(self) -> str:
        """Whether the assistant helped, in a sentence."""
        if not self.calls:
            return "no call yet"
        total = self.seconds["total"]
        made = f"{self.tokens:,} tokens in {self.forwards + self.calls:,} forwards"
        rate = f", {self.tokens / total:.1f} tokens/s" if total else ""
        if self.tier == "plain" and not self.drafted:
            why = f" ({self.reason})" if self.reason else ""
            return f"not assisted{why}: {made}{rate}"
        per_row = " a row" if self._from_prefill > self.calls else ""
        made += f" ({self.tokens_per_forward:.2f}{per_row} a forward"
        made += f", {self.saved_forwards:,} forwards saved)" if self.saved_forwards else ")"
        said = f"{made}{rate}"
        if self.compared_seconds:
            ratio = self.undrafted_seconds / self.compared_seconds
            times = f"{'about' if ratio >= 1 else 'only'} {ratio:.2f} times as fast as"
            said = f"{times} without drafts: {said}, {self.compared_seconds:.2f} s where steps "
            said += f"without drafts take about {self.undrafted_seconds:.2f} s"
        if self.read_before:
            said += f"; {self.read_before:,} tokens of the prompt were read before"
        if self.why_unread:
            said += f"; no text is kept: {self.why_unread}"
        if self.once_seconds > max(_SAID_ONCE[0] * total, _SAID_ONCE[1]):
            said += f"; {self.once_seconds:.2f} s went to what is done once for a model"
        return said

    def __str__(self) -> str:
        if not self.calls:
            return self.summary
        expected = self.expected_accepted + self.expected_rejected
        came = f"; {self.expected_accepted} of {expected} expected tokens came" if expected else ""
        phases = ("test", "prefill", *PHASES)
        share = " ".join(f"{name} {1e3 * self.seconds[name]:.0f}" for name in phases)
        served = [self.tier, self.attention] if self.tier else []
        if self.repeated or self.recordings:
            served.append(f"{self.repeated} of {self.forwards:,} forwards recorded")
        tier = f" [{', '.join(filter(None, served))}]" if served else ""
        spent = f" (ms: {share})" if any(self.seconds.values()) else ""
        return f"{self.summary}{came}{tier}{spent}"


class Stats:
    """`assistant.stats`: the last call and the total.

    Args:
        names: of the drafters.

    Attributes:
        sources: accepted tokens by the drafter that drafted them; one may count for several.
    """

    def __init__(self, names: Sequence[str]):
        self.last = CallStats()
        self.total = CallStats()
        self.sources = dict.fromkeys(names, 0)
        self._lock = Lock()

    def count_sources(self, accepted: Sequence[int]) -> None:
        """Count accepted tokens by the drafters that proposed them."""
        with self._lock:
            for name, tokens in zip(self.sources, accepted, strict=True):
                self.sources[name] += tokens

    def add(self, call: CallStats) -> None:
        self.last = call
        self.total.add(call)

    def __repr__(self) -> str:
        if not self.total.calls:
            return "no call yet"
        said = f"last call: {self.last.summary}."
        if self.total.calls > 1:
            said += f"\nall {self.total.calls} calls: {self.total.summary}."
        return said
