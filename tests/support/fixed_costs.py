"""Costs that do not hang on the machine."""

import numpy as np

from benchmarks.simulation import KnownCost
from hf_retrieval_assist.policy.cost_store import CostModels

CURVES = {
    "flat": lambda n: 0.02,
    "gpu": lambda n: 0.02 * (1 + 0.003 * (n - 1)),
    "linear": lambda n: 0.02 * (1 + 0.3 * (n - 1)),
    "step": lambda n: 0.02 if n <= 64 else 0.04,
    "cpu": lambda n: 0.02 * np.interp(n, [1, 2, 4, 16, 32, 64], [1, 1.9, 2.3, 2.6, 3.3, 5]),
}


class FixedCosts(CostModels):
    """One known t(n) for everything."""

    def __init__(self, seconds):
        super().__init__()
        self.known = KnownCost(seconds)

    def get(self, key):
        return self.known
