"""Acceptance measured for the automaton drafters' evidence classes.

Each figure is the share of drafted nodes that the recorded text went on with, among those whose
parents it went on with: real chat, programs, worked mathematics, SQL and file edits, a kind of text
counting at most a thousand nodes per class, and thin classes drawn towards the next shorter match.
"""

import numpy as np

# By tokens matched (1, 2, 3, 4, -6, -8, -12, -20, more): a row for matches with several earlier
# occurrences, a row for those with one. Columns: depth 1, 2, -4, -8, -16, more.
CHAIN_PRIORS = np.array(
    [
        [0.272, 0.469, 0.539, 0.616, 0.726, 0.811],
        [0.347, 0.489, 0.565, 0.727, 0.811, 0.926],
        [0.393, 0.514, 0.551, 0.660, 0.769, 0.856],
        [0.445, 0.558, 0.641, 0.791, 0.927, 0.983],
        [0.484, 0.599, 0.621, 0.706, 0.849, 0.942],
        [0.503, 0.610, 0.665, 0.816, 0.923, 0.982],
        [0.525, 0.603, 0.722, 0.765, 0.814, 0.974],
        [0.559, 0.670, 0.666, 0.867, 0.928, 0.990],
        [0.642, 0.679, 0.732, 0.822, 0.804, 0.949],
        [0.642, 0.731, 0.705, 0.884, 0.927, 0.981],
        [0.701, 0.700, 0.759, 0.722, 0.860, 0.977],
        [0.718, 0.755, 0.814, 0.861, 0.943, 0.980],
        [0.757, 0.784, 0.782, 0.708, 0.859, 0.958],
        [0.807, 0.882, 0.845, 0.818, 0.929, 0.974],
        [0.788, 0.768, 0.776, 0.689, 0.859, 0.958],
        [0.836, 0.833, 0.806, 0.879, 0.970, 0.997],
        [0.831, 0.815, 0.851, 0.844, 0.928, 0.939],
        [0.992, 0.987, 0.993, 0.995, 0.996, 0.994],
    ],
    dtype=np.float32,
).ravel()

# By tokens matched up to the parent (1, 2, -4, -8, -16, -32, more), one row each. Columns: share of
# the parent's occurrences, below 0.05, -0.1, -0.2, -0.4, -0.6, -0.8, below 1, 1; and a parent that
# occurred once.
TREE_PRIORS = np.array(
    [
        [0.026, 0.047, 0.087, 0.139, 0.200, 0.439, 0.660, 0.355, 0.133],
        [0.025, 0.053, 0.095, 0.160, 0.233, 0.382, 0.706, 0.596, 0.237],
        [0.026, 0.049, 0.081, 0.149, 0.235, 0.416, 0.718, 0.753, 0.370],
        [0.041, 0.051, 0.089, 0.153, 0.270, 0.440, 0.729, 0.806, 0.572],
        [0.023, 0.049, 0.071, 0.133, 0.264, 0.505, 0.841, 0.935, 0.816],
        [0.023, 0.041, 0.086, 0.210, 0.301, 0.495, 0.768, 0.969, 0.898],
        [0.023, 0.041, 0.086, 0.310, 0.318, 0.498, 0.765, 0.971, 0.971],
    ],
    dtype=np.float32,
).ravel()
