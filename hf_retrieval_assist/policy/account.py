"""What drafts are worth in calls of one kind: how far they are believed, and which drafters pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..system.locks import Lock
from ..system.running_mean import toward

# Plain steps that a drafter may lose before it has brought anything: few, because a first prompt
# may hold nothing to retrieve; a costly one is known only after some drafts.
_LENT, _LENT_TO_COSTLY = 0.3, 1.5
_MEMORY = 1 / 32  # the newest ask is at least this part of a mean
_WORST = 8.0  # plain steps that an ask loses at most, since machines stall
# Shares of the time that trials may lose: the first one behind asks that gained, and so on.
_TRIALS = 1 / 32, 1 / 64, 1 / 128, 1 / 256
_TERM = 32  # asks over which the price of getting ready is spread
_OPEN = 0.5  # share of next tokens, above which the others' drafts leave a step open
_HOST_MEMORY = 0.2
_PROMISE_MEMORY = 64.0  # promised tokens, after which half is forgotten


class Entry:
    """What a drafter's asks gain on average, in plain steps.

    An ask gains the accepted tokens that nobody before it had drafted, less its share of the wider
    forward and the time of drafting and learning. While asks gain, the drafter is asked in every
    step. Then one ask is a trial now and then, since texts change: so late that trials lose a small
    share of the time, which halves with each that gains nothing. What a trial gains counts alone.
    """

    def __init__(self, lent: float) -> None:
        self.gain = 0.0
        self._lent = lent
        self._owed = 0.0  # plain steps of getting ready that are not paid
        self._asks = self._waited = self._trials = 0

    def asks(self) -> bool:
        """Whether to ask the drafter in this step; to be called once for each."""
        if not self._asks or self.gain + self._lent / self._asks > 0:
            return True
        self._waited += 1
        share = _TRIALS[min(self._trials, len(_TRIALS) - 1)]
        if self._waited * share < self._owed - self.gain:
            return False
        self._trials += 1
        self._asks, self._waited, self._lent = 0, 0, 0.0
        return True

    def learn(self, gained: float, owed: float) -> None:
        """Count an ask.

        Args:
            gained: net of what it took.
            owed: for getting ready, from which later asks gain too.
        """
        if gained > 0:
            self._trials = 0
        self._owed += owed
        instalment = self._owed / _TERM
        self._owed -= instalment
        self._asks += 1
        gained = max(gained - instalment, -_WORST)
        self.gain += max(1 / self._asks, _MEMORY) * (gained - self.gain)


@dataclass
class Use:
    """What one step asked of a drafter.

    Attributes:
        entry: that decided it; None without an account.
        seconds: of drafting and learning.
        owed: seconds of getting ready: reading a prompt, or what came while it was left alone.
        uncharged: seconds of making what drafts of many texts need.
        promised: tokens per row that its drafts are expected to bring besides the others'.
    """

    entry: Entry | None = None
    seconds: float = 0.0
    owed: float = 0.0
    uncharged: float = 0.0
    promised: float = 0.0


class Account:
    """Who is asked for drafts, and how far drafts are believed. Safe to share between threads.

    The nodes that a planner chooses are likelier than others to be those that were overestimated,
    so fewer tokens come than they promise.

    Args:
        costly: of each drafter, whether it is.
        texts: that are drafted for together: an ask tells as much as it would of each of them.
    """

    def __init__(self, costly: Sequence[bool], texts: int = 1) -> None:
        lent, lent_to_costly = _LENT / texts, _LENT_TO_COSTLY / texts
        # Costly drafters may pay where those before them leave a step open, and only there.
        self._entries = [
            {True: Entry(lent_to_costly), False: Entry(lent)} if dear else {True: Entry(lent)}
            for dear in costly
        ]
        # Half of what drafts promise is believed before any was verified.
        self._promised, self._came = 2.0, 1.0  # tokens
        # Seconds of planning, merging and telling, in steps that ask nobody and in others.
        self._host = {True: 0.0, False: 0.0}
        self._lock = Lock()

    @property
    def belief(self) -> float:
        """Share of the promised tokens that are expected to come, at most 1."""
        return min(1.0, self._came / self._promised)

    def count_promise(self, promised: float, came: float) -> None:
        """Count tokens that drafts were expected to bring, and those that came, as far as they save
        steps."""
        with self._lock:
            self._promised += promised
            self._came += came
            if self._promised > _PROMISE_MEMORY:
                self._promised *= 0.5
                self._came *= 0.5

    def asked(self, number: int, missed: float) -> Entry | None:
        """The entry of a drafter that is to be asked, where those before it leave open a share
        `missed` of the next tokens; to be called once for each that could draft."""
        with self._lock:
            entries = self._entries[number]
            entry = entries.get(missed > _OPEN, entries[True])
            return entry if entry.asks() else None

    def learn(
        self, uses: Mapping[int, Use], accepted: Sequence[float], plain: float, wider: float
    ) -> None:
        """Count the asks of a step.

        Args:
            uses: by drafter.
            accepted: by drafter, plain steps that its tokens save which none before it had drafted.
            plain: seconds of a plain step.
            wider: seconds that the step's forward took longer.
        """
        promised = sum(use.promised for use in uses.values())
        with self._lock:
            asking = max(0.0, self._host[False] - self._host[True]) / max(1, len(uses))
            for number, use in uses.items():
                assert use.entry is not None
                share = use.promised / promised if promised else 0.0
                brought = max(0.0, accepted[number] - share * wider / plain)
                use.entry.learn(brought - (use.seconds + asking) / plain, use.owed / plain)

    def count_host(self, seconds: float, is_plain: bool) -> None:
        """Count what the host has done in a step besides its forward, its walk and drafting."""
        with self._lock:
            self._host[is_plain] = toward(self._host[is_plain], max(0.0, seconds), _HOST_MEMORY)
