"""A running mean of timings on a machine that does other things too."""


class ClippedMean:
    """The mean of what was observed lately, where no observation counts more than twice the mean.

    Args:
        share: weight of a new observation, in (0, 1].
        value: what is known; 0: nothing, so that the first observation is taken as it is.

    Attributes:
        value: the mean.
    """

    def __init__(self, share: float, value: float = 0.0) -> None:
        self.share = share
        self.value = value

    def observe(self, seconds: float) -> None:
        """Move towards an observation, at least 0."""
        known = self.value or seconds
        self.value = known + self.share * min(seconds - known, known)
