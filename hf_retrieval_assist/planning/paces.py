"""Whether calls get on faster with drafts than without: both are timed."""

from __future__ import annotations

from .clipped_mean import ClippedMean

_COLD = 2  # calls that measure the model, choose kernels and fill caches
_FEWEST = 32  # tokens per row that a timing takes
_MEMORY = 0.1  # weight of a new timing in the mean
_DOUBTFUL = 0.85  # of what the cost model expects of a plain step: above that, plain is tried
_MARGIN = 0.97  # of the drafted pace: below that, plain is faster
_GROWTH = 4  # of a rest that the next timing confirms
_MOST_RESTS = 32  # calls
_MOST_PATIENCE = 64  # calls
_LOOK_AGAIN = 16  # plain calls, after which the slower kernels are tried again


class Paces:
    """Two paces of calls of one kind, drafted and plain, in seconds per token of a row.

    :class:`~hf_retrieval_assist.planning.thrift.Thrift` sees to it that drafting pays for itself.
    What remains is the loop's own work: where drafts bring nothing, transformers' loop may be
    faster. Where calls get on no faster than plain steps should, one call is decoded by that and
    timed. If that was faster, more of them follow, 1, 4, 16, … until another with drafts, which
    tells whether they bring something by now. So drafts that bring nothing cost their excess in
    one call of so many.

    Plain calls run by the model's own kernels or by those for few rows, whichever are faster.
    """

    def __init__(self) -> None:
        self._drafted = _Pace()
        self._plain = {True: _Pace(), False: _Pace()}  # by whether rerouted
        self._calls = self._plain_calls = 0
        self._rests = 0  # calls to be decoded plainly
        self._streak = 0  # calls of the last rest
        self._patience = 1  # drafted calls before plain is tried
        self._waited = 0

    def rests(self) -> bool:
        """Whether to decode the next call plainly; to be called once for each."""
        if self._rests == 0:
            return False
        self._rests -= 1
        return True

    def reroutes(self) -> bool:
        """Whether kernels for few rows are to serve the next plain call, where both may."""
        rerouted, own = self._plain[True].seconds, self._plain[False].seconds
        looks_again = self._plain_calls % _LOOK_AGAIN == _LOOK_AGAIN - 1
        return not rerouted or (bool(own) and (rerouted < own) != looks_again)

    def observe_plain(self, seconds: float, tokens: int, rerouted: bool) -> None:
        """Count a call of so many tokens per row that was decoded plainly."""
        self._plain_calls += 1
        self._plain[rerouted].observe(seconds, tokens)

    @property
    def _plain_seconds(self) -> float:
        return min((pace.seconds for pace in self._plain.values() if pace.seconds), default=0.0)

    def observe_drafted(self, seconds: float, tokens: int, plain_step: float) -> None:
        """Count a call that was drafted for.

        Args:
            seconds: from the first token to the last.
            tokens: between them, of the longest row.
            plain_step: seconds that a plain step is expected to take.
        """
        self._calls += 1
        if self._calls <= _COLD:
            return
        self._drafted.observe(seconds, tokens)
        # The mean knows of gains in few calls of many, the last call of gains that begin.
        pace = min(self._drafted.seconds, self._drafted.last)
        if 0 < self._plain_seconds < _MARGIN * pace:
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
        last: the newest timing.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self._mean = ClippedMean(_MEMORY)
        self._lacking = (0.0, 0)

    @property
    def seconds(self) -> float:
        return self._mean.value

    def observe(self, seconds: float, tokens: int) -> None:
        seconds, tokens = self._lacking[0] + seconds, self._lacking[1] + tokens
        if tokens >= _FEWEST:
            self.last = seconds / tokens
            self._mean.observe(self.last)
            seconds, tokens = 0.0, 0
        self._lacking = seconds, tokens
