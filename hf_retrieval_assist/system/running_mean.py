"""A running mean of timings on a machine that does other things too."""


def toward(mean: float, seen: float, share: float) -> float:
    """The mean, moved by a share, in (0, 1], towards what was seen, at least 0.

    Nothing counts more than twice the mean. A mean of 0 knows nothing and takes what is seen.
    """
    known = mean or seen
    return known + share * min(seen - known, known)
