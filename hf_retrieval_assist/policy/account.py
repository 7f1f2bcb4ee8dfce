"""What drafting brings and takes, in seconds: one account for each model and kind of call.

Three questions. How many nodes to verify: the account's planner says so, from t(n) and from how
much of what drafts promised came true. Which drafters to ask: each has an entry of its own, and one
whose drafts do not pay for their time is left alone, while the others go on. Whether to draft for a
call at all: where no drafter pays, and transformers' own loop was timed to be faster, that decodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..structures import draft_tree
from ..system.running_mean import toward
from ..types.token_tree import Forest, TokenTree
from .cost_model import CostModel
from .planner import Planner

# A drafter's, in plain steps. What it may lose before it has brought anything is little, because a
# first prompt may hold nothing to retrieve; a costly one is known only after some drafts.
_CREDIT, _COSTLY_CREDIT = 0.6, 1.5
_BAD_LUCK = 16  # asks that may bring nothing, of a drafter that has gained
_SHARES = (1 / 32, 1 / 64, 1 / 128, 1 / 256)  # shares of time, lent for asking again
_PRICE_MEMORY = 0.2
_GAIN_MEMORY = 0.1
_PAYS = 0.03  # share of a plain step that an ask gains
_TERM = 32  # asks over which the price of getting ready is spread
_OPEN = 0.5  # share of next tokens, above which the others' drafts leave a step open

# Half of what drafts promise is believed before any was verified.
_FIRST_PROMISED, _FIRST_ACCEPTED = 2.0, 1.0  # tokens

# Rests, counted in calls.
_COLD = 2  # calls that measure the model, choose kernels and record forwards
_FEWEST = 16  # tokens per row that a timing takes
_PACE_MEMORY = 0.1
_DOUBTFUL = 0.85  # share of what a plain step is expected to take: above that, plain is tried
_MARGIN = 0.97  # share of the drafted pace: below that, plain is faster
_GROWTH = 4  # factor of a rest that the next timing confirms
_LOST = 0.05  # share of plain's time that calls with drafts between rests may lose
_MOST_FIRST = 16  # calls of a rest that nothing has confirmed
_MOST_RESTS = 32  # calls
_MOST_PATIENCE = 64  # calls
_LOOK_AGAIN = 16  # plain calls, after which the slower kernels are tried again


class _Entry:
    """A drafter's part of the account, in plain steps.

    Accepted tokens that nobody before it had drafted save time, less its share of the wider
    forward; drafting and learning take time. The drafter is asked as long as its credit covers what
    the next ask is expected to lose: always, where asks gain. Where they lose, the credit runs out,
    and then a share of the time that passes is lent for asking again, since texts change; each
    fruitless ask halves the share. So a drafter never loses more than its first credit and that
    share of the time, and none is left alone for good.
    """

    def __init__(self, credit: float) -> None:
        self._credit = credit
        self._asks = 0
        self._price = 0.0  # an ask's, lately
        self._gained = 0.0  # what an ask gained, lately
        self._owed = 0.0  # what getting ready took
        self._fruitless = 0

    @property
    def pays(self) -> bool:
        """Whether it gains time, lately."""
        return self._gained - self._price > _PAYS

    def asks(self) -> bool:
        """Whether to ask the drafter in this step. If not, some of the step is lent."""
        if self._price - self._gained <= self._credit:  # what it is expected to lose
            return True
        share = _SHARES[self._fruitless]
        paid = min(self._owed, share)
        self._owed -= paid
        self._credit += share - paid
        return False

    def learn(self, gained: float, spent: float, owed: float = 0.0) -> None:
        """Count an ask.

        Args:
            gained: net of the wider forward.
            spent: on drafting and learning.
            owed: for getting ready, from which later asks gain too.
        """
        self._owed += owed
        instalment = self._owed / _TERM
        self._owed -= instalment
        spent += instalment
        self._asks += 1
        self._price = toward(self._price, spent, _PRICE_MEMORY)
        self._gained += max(1 / self._asks, _GAIN_MEMORY) * (gained - self._gained)
        # Bounded, so that neither a stall of the machine nor past success counts for long.
        most = _BAD_LUCK * self._price
        self._credit = min(max(self._credit + gained - spent, -most), max(most, _CREDIT))
        if gained > spent:
            self._fruitless = 0
        elif self._price - self._gained > self._credit:
            self._fruitless = min(self._fruitless + 1, len(_SHARES) - 1)


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

    entry: _Entry | None = None
    seconds: float = 0.0
    owed: float = 0.0
    uncharged: float = 0.0
    promised: float = 0.0


@dataclass
class DraftedStep:
    """One step: what it may cost, whom it asks, what that took, and what they proposed.

    Attributes:
        price: t(n) for one row; None where only tokens are counted.
        planner: says how many nodes are verified.
        account: says who drafts; None: everybody does.
        sessions: the texts that are drafted for.
        uses: by the number of the drafter that was asked.
        is_plain: whether the account has asked nobody.
        proposals: of each drafter, calibrated: a tree of each text.
        trees: of each text what is to be verified.
    """

    price: CostModel | None
    planner: Planner
    account: Account | None = None
    sessions: Sequence[Any] = ()
    uses: dict[int, Use] = field(default_factory=dict)
    is_plain: bool = False
    proposals: list[Forest] = field(default_factory=list)
    trees: Forest = field(default_factory=partial(Forest.empty, 0))

    def reached(self, place: int, accepted: Sequence[int]) -> list[int]:
        """How many of a text's accepted tokens each drafter had proposed; nothing where none were
        accepted."""
        if not accepted:
            return []
        found: list[int] = draft_tree.reached(self.proposals, place, accepted)
        return found

    def promise(self, place: int, tree: TokenTree, token_ids: Sequence[int]) -> tuple[float, int]:
        """Tokens that a verified tree was expected to bring, and those that came of it; where
        nothing was verified, the same of the proposals' best guess at the next token, which the
        text judges."""
        if len(tree):
            return tree.expected_tokens, len(token_ids) - 1
        prob, token = max((proposal.first(place) for proposal in self.proposals), default=(0.0, -1))
        return prob, int(token == token_ids[0])

    def asks(self, number: int, missed: float = 1.0) -> bool:
        """Whether to ask a drafter, where those before it leave open a share `missed` of the next
        tokens; to be called once for each that could draft."""
        if self.account is None:
            self.uses[number] = Use()
            return True
        with self.account.lock:
            entries = self.account.entries[number]
            entry = entries.get(missed > _OPEN, entries[True])
            if entry.asks():
                self.uses[number] = Use(entry)
        return number in self.uses

    def end(self, width: int, accepted: Sequence[float]) -> None:
        """Enter the step in the account.

        Args:
            width: tokens per row that were verified.
            accepted: by drafter, tokens per row that none before it had drafted.
        """
        if self.account is None or self.price is None:
            return
        seconds = self.price.curve(width)
        plain = float(seconds[0])
        wider = float(seconds[-1]) / plain - 1
        promised = sum(use.promised for use in self.uses.values())
        with self.account.lock:
            asking = self.account.asking_seconds / max(1, len(self.uses))
            for number, use in self.uses.items():
                assert use.entry is not None
                share = use.promised / promised if promised else 0.0
                gained = max(0.0, accepted[number] - share * wider)
                use.entry.learn(gained, (use.seconds + asking) / plain, use.owed / plain)

    def count_host(self, seconds: float) -> None:
        """Count what the host has done in a step besides its forward and walk, drafters' own time
        included."""
        if self.account is not None:
            own = sum(use.seconds + use.owed + use.uncharged for use in self.uses.values())
            host, plain = self.account.host, self.is_plain
            with self.account.lock:
                host[plain] = toward(host[plain], max(0.0, seconds - own), _PACE_MEMORY)


class Account:
    """What drafting for forwards of one model and kind brings and takes. Safe to share.

    Args:
        planner: says how many nodes; its own.
        costly: of each drafter, whether it is.

    Attributes:
        entries: of each drafter, by whether those before it leave a step open; that for a step
            which they do stands for both where there is no other.
        lock: held while an entry, or what the planner has learnt, is looked at or changes.
    """

    def __init__(self, planner: Planner, costly: Sequence[bool]) -> None:
        self.planner = planner
        planner.learn(_FIRST_PROMISED, _FIRST_ACCEPTED)
        self.lock = planner.lock
        self.entries = [{True: _Entry(_CREDIT)} for _ in costly]
        for number in np.flatnonzero(costly):
            # It may pay where the others leave a step open, and only there.
            self.entries[number] = {True: _Entry(_COSTLY_CREDIT), False: _Entry(_CREDIT)}
        # Seconds of planning, merging and telling, in steps that ask nobody and in others.
        self.host = {True: 0.0, False: 0.0}
        self._drafted = _Pace()
        self._plain = {True: _Pace(), False: _Pace()}  # keys: whether rerouted
        self._calls = self._plain_calls = 0
        self._rests = 0  # calls to be decoded plainly
        self._streak = 0  # calls of the last rest
        self._patience = 1  # drafted calls before plain is tried
        self._waited = 0

    @property
    def asking_seconds(self) -> float:
        """What asking any drafter takes besides its own time."""
        return max(0.0, self.host[False] - self.host[True])

    def pays(self, number: int) -> bool:
        """Whether a drafter gains time, lately."""
        return any(entry.pays for entry in self.entries[number].values())

    def rests(self) -> bool:
        """Whether to decode the next call plainly; to be called once for each."""
        with self.lock:
            if self._rests == 0:
                return False
            self._rests -= 1
            return True

    def reroutes(self) -> bool:
        """Whether kernels for few rows are to serve the next plain call, where both may."""
        rerouted, own = self._plain[True].seconds, self._plain[False].seconds
        looks_again = self._plain_calls % _LOOK_AGAIN == _LOOK_AGAIN - 1
        return not rerouted or (bool(own) and (rerouted < own) != looks_again)

    def count_plain(self, seconds: float, tokens: int, rerouted: bool) -> None:
        """Count a call of so many tokens per row that was decoded plainly."""
        with self.lock:
            self._plain_calls += 1
            self._plain[rerouted].observe(seconds, tokens)
            if not (self._rests or self._streak or self._rest_if_faster()):
                self._wait_for_next_trial()

    def count_drafted(
        self, seconds: float, tokens: int, plain_step: float | None, recorded: bool = True
    ) -> None:
        """Count a call that was drafted for.

        Where no drafter pays and calls get on no faster than plain steps should, one call is
        decoded by transformers' loop and timed. If that was faster, more of them follow, as many as
        make up for one with drafts, and 4 times as many after each that brings nothing either.

        Args:
            seconds: from the first token to the last.
            tokens: between them, of the longest row.
            plain_step: seconds that a plain step is expected to take; None: nobody knows, or calls
                are not to be tried plainly.
            recorded: whether forwards were recorded in it, or may have been.
        """
        with self.lock:
            self._calls += 1
            if self._calls > (_COLD if recorded else 1):
                self._drafted.observe(seconds, tokens)
                self._choose_rests(plain_step)

    def _choose_rests(self, plain_step: float | None) -> None:
        if any(map(self.pays, range(len(self.entries)))):
            self._streak = 0
            return
        if self._rest_if_faster():
            return
        self._streak = 0
        self._waited += 1
        if plain_step is None:
            return
        if self._waited >= self._patience and self._pace > _DOUBTFUL * plain_step:
            self._waited, self._rests = 0, 1
            self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def _wait_for_next_trial(self) -> None:
        """Let what trials of plain decoding lose be no more of the time than rests may lose."""
        if self._pace and math.isfinite(self._plain_pace):
            lost = self._plain_pace / self._pace - 1
            self._patience = min(max(self._patience, math.ceil(lost / _LOST)), _MOST_PATIENCE)

    @property
    def _plain_pace(self) -> float:
        """The faster one, rerouted or not; infinity while nothing is known."""
        known = [found.seconds for found in self._plain.values() if found.seconds]
        return min(known, default=math.inf)

    @property
    def _pace(self) -> float:
        """The drafted pace: the mean knows of gains in few calls of many, the last call of gains
        that begin."""
        return min(self._drafted.seconds, self._drafted.last)

    def _rest_if_faster(self) -> bool:
        """Leave calls to transformers' loop if that was timed to be faster; whether it was."""
        plain, pace = self._plain_pace, self._pace
        if plain >= _MARGIN * pace:
            return False
        enough = min(math.ceil((pace / plain - 1) / _LOST), _MOST_FIRST)
        self._streak = min(max(_GROWTH * self._streak, enough), _MOST_RESTS)
        self._rests = self._streak
        return True


class _Pace:
    """Seconds per token, 0 while nothing is known; short calls are taken together.

    Attributes:
        seconds: the mean.
        last: the newest timing.
    """

    def __init__(self) -> None:
        self.seconds = self.last = 0.0
        self._lacking = (0.0, 0)

    def observe(self, seconds: float, tokens: int) -> None:
        seconds, tokens = self._lacking[0] + seconds, self._lacking[1] + tokens
        if tokens >= _FEWEST:
            self.last = seconds / tokens
            self.seconds = toward(self.seconds, self.last, _PACE_MEMORY)
            seconds, tokens = 0.0, 0
        self._lacking = seconds, tokens
