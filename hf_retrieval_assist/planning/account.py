"""What drafting brings and takes, in seconds: one account for each model and kind of call.

It is asked three things. How many nodes to verify: its planner says so, from t(n) and from how
much of what drafts promised came true. Whom to ask: each drafter has an entry of its own, and one
whose drafts do not pay for their time is left alone, while the others go on. Whether to draft for a
call at all: where no drafter pays, and transformers' own loop was timed to be faster, that decodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cost_model import CostModel
from .planner import Planner
from .running_mean import toward

# Of a drafter. What it may lose before it has brought anything is little, because a first prompt
# may hold nothing to retrieve; a costly one is known only after some drafts.
_CREDIT, _COSTLY_CREDIT = 0.75, 4.0  # plain steps
_MOST_CREDIT = 8.0
_SHARES = (1 / 32, 1 / 64, 1 / 128, 1 / 256)  # of the time that passes, lent for asking again
_PRICE_MEMORY = 0.2
_BALANCE_MEMORY = 0.05
_PAYS = 0.03  # of a plain step that a drafter gains in a step, lately
_HIT_MEMORY = 0.1

# Of all drafts, before any was verified: half is believed.
_FIRST_PROMISED, _FIRST_ACCEPTED = 2.0, 1.0  # tokens

# Of calls.
_COLD = 2  # calls that measure the model, choose kernels and fill caches
_FEWEST = 32  # tokens per row that a timing takes
_PACE_MEMORY = 0.1
_DOUBTFUL = 0.85  # of what the cost model expects of a plain step: above that, plain is tried
_MARGIN = 0.97  # of the drafted pace: below that, plain is faster
_GROWTH = 4  # of a rest that the next timing confirms
_MOST_RESTS = 32  # calls
_MOST_PATIENCE = 64  # calls
_LOOK_AGAIN = 16  # plain calls, after which the slower kernels are tried again


class _Entry:
    """A drafter's part of the account.

    Accepted tokens that nobody before it had drafted save time, less its share of the wider
    forward; its drafting and its learning take time. While it is in credit, the drafter is asked.
    Then it is left alone, but a share of the time that passes is saved up for asking it again,
    since texts change: pauses grow with the time that a draft takes, and each fruitless one halves
    the share. So a drafter never loses more than its first credit and that share of the time.
    Whether wider forwards pay is for the planner to say.

    Attributes:
        pays: whether it gains time, lately.
    """

    def __init__(self, costly: bool) -> None:
        self.costly = costly
        self.pays = False
        self._credit = _COSTLY_CREDIT if costly else _CREDIT  # in plain steps, like all below
        self._price = 0.0  # of a draft, lately
        self._balance = 0.0  # of a step, lately
        self._gained = 0.0  # by a draft, lately, where nobody before it had drafted
        self._fruitless = 0
        self._pause = 0  # steps

    def in_credit(self) -> bool:
        """Whether to ask it in the next step; to be called once for each."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def adds(self, missed: float) -> bool:
        """Whether to ask it beside drafts of others that are right but for a share of the steps."""
        alone = self._gained > self._price
        return not (self.costly and alone) or missed * self._gained > self._price

    def settle(self, missed: float, gained: float, spent: float) -> None:
        """Count a step that asked it, in plain steps."""
        self._price = toward(self._price, spent, _PRICE_MEMORY)
        if missed > _HIT_MEMORY:
            self._gained += _HIT_MEMORY * (gained / missed - self._gained)
        self._balance += _BALANCE_MEMORY * (gained - spent - self._balance)
        self.pays = self._balance > _PAYS
        self._credit = min(max(self._credit + gained - spent, -_MOST_CREDIT), _MOST_CREDIT)
        # What the next draft may lose: a costly one that mostly pays takes more than the credit.
        lacking = self._price - max(gained, self._gained) - self._credit
        if gained > spent:
            self._fruitless = 0
        elif lacking > 0:
            self._fruitless = min(self._fruitless + 1, len(_SHARES) - 1)
        if lacking > 0:
            self._pause = math.ceil(lacking / _SHARES[self._fruitless])
            self._credit += lacking

    def rest(self) -> None:
        """Count a step that did not ask it."""
        self._balance -= _BALANCE_MEMORY * self._balance
        self.pays = self._balance > _PAYS


@dataclass
class _Use:
    """What one step asked of a drafter.

    Attributes:
        missed: share of the rows' next tokens that nobody before it had drafted, as far as known.
        seconds: of drafting and learning.
        promised: tokens per row that its drafts are expected to bring besides the others'.
    """

    missed: float
    seconds: float = 0.0
    promised: float = 0.0


@dataclass
class Drafting:
    """One step of an account: whom it asks, and what that took.

    Attributes:
        price: t(n) for one row.
        uses: by the number of the drafter that was asked.
    """

    account: Account
    price: CostModel
    in_credit: Sequence[bool]
    uses: dict[int, _Use] = field(default_factory=dict)

    def asks(self, number: int, missed: float = 1.0) -> bool:
        """Whether to ask a drafter, where those before it leave open a share `missed`."""
        asked = self.in_credit[number] and self.account.entries[number].adds(missed)
        if asked:
            self.uses[number] = _Use(missed)
        return asked

    def spend(self, number: int, seconds: float, promised: float = 0.0) -> None:
        """Add what a drafter that was asked took, and what its drafts promise."""
        use = self.uses[number]
        use.seconds += seconds
        use.promised += promised

    def settle(self, width: int, accepted: Sequence[float]) -> None:
        """The step is over.

        Args:
            width: tokens per row that were verified.
            accepted: by drafter, tokens per row that none before it had drafted.
        """
        seconds = self.price.curve(width)
        plain = float(seconds[0]) + self.price.overhead()
        wider = float(seconds[-1] - seconds[0]) / plain
        promised = sum(use.promised for use in self.uses.values())
        with self.account.lock:
            for number, entry in enumerate(self.account.entries):
                use = self.uses.get(number)
                if use is None:
                    entry.rest()
                    continue
                share = use.promised / promised if promised else 0.0
                gained = max(0.0, accepted[number] - share * wider)
                entry.settle(use.missed, gained, use.seconds / plain)


class Account:
    """What drafting for forwards of one model and kind brings and takes. Safe to share.

    Args:
        planner: says how many nodes; its own.
        costly: of each drafter, whether it is.
    """

    def __init__(self, planner: Planner, costly: Sequence[bool]) -> None:
        self.planner = planner
        planner.learn(_FIRST_PROMISED, _FIRST_ACCEPTED)
        self.lock = planner.lock
        self.entries = [_Entry(one) for one in costly]
        self._drafted = _Pace()
        self._plain = {True: _Pace(), False: _Pace()}  # by whether rerouted
        self._calls = self._plain_calls = 0
        self._rests = 0  # calls to be decoded plainly
        self._streak = 0  # calls of the last rest
        self._patience = 1  # drafted calls before plain is tried
        self._waited = 0

    def begin(self, price: CostModel) -> Drafting:
        """A step, with t(n) for one row; to be called once for each."""
        with self.lock:
            return Drafting(self, price, [entry.in_credit() for entry in self.entries])

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

    def count_drafted(self, seconds: float, tokens: int, plain_step: float) -> None:
        """Count a call that was drafted for.

        Where no drafter pays and calls get on no faster than plain steps should, one call is
        decoded by transformers' loop and timed. If that was faster, more of them follow, 1, 4,
        16, … until another with drafts, which tells whether they bring something by now.

        Args:
            seconds: from the first token to the last.
            tokens: between them, of the longest row.
            plain_step: seconds that a plain step is expected to take.
        """
        with self.lock:
            self._calls += 1
            if self._calls > _COLD:
                self._drafted.observe(seconds, tokens)
                self._choose_rests(plain_step)

    def _choose_rests(self, plain_step: float) -> None:
        if any(entry.pays for entry in self.entries):
            self._streak = 0
            return
        # The mean knows of gains in few calls of many, the last call of gains that begin.
        pace = min(self._drafted.seconds, self._drafted.last)
        known = [found.seconds for found in self._plain.values() if found.seconds]
        if min(known, default=math.inf) < _MARGIN * pace:
            self._streak = self._rests = min(_GROWTH * self._streak or 1, _MOST_RESTS)
            return
        self._streak = 0
        self._waited += 1
        if self._waited >= self._patience and pace > _DOUBTFUL * plain_step:
            self._waited, self._rests = 0, 1
            self._patience = min(2 * self._patience, _MOST_PATIENCE)


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
