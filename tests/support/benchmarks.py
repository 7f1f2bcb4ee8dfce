"""What tests of benchmarks share."""

import numpy as np

from benchmarks.__main__ import parse
from benchmarks.traces import Trace


def silent(text):
    """Progress that nobody reads."""


def quick(*argv):
    """Arguments of a run of small size."""
    return parse(["--quick", *map(str, argv)])


def rows(report, title):
    """Those of the one table whose title begins like this."""
    (table,) = [table for table in report.tables if table.title.startswith(title)]
    return table.rows


def phrases(name, seed=0, requests=3):
    """Requests whose outputs repeat a phrase of their prompts, which is in the corpus."""
    rng = np.random.default_rng(seed)
    phrase = rng.integers(0, 50, 24).astype(np.int32)
    pairs = [
        (np.concatenate([rng.integers(0, 50, 12).astype(np.int32), phrase]), np.tile(phrase, 3))
        for _ in range(requests)
    ]
    return Trace(name, pairs, [rng.integers(0, 50, 40).astype(np.int32), phrase])
