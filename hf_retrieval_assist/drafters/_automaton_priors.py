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
        [0.27, 0.47, 0.54, 0.62, 0.73, 0.81],
        [0.35, 0.49, 0.57, 0.73, 0.81, 0.93],
        [0.39, 0.51, 0.55, 0.66, 0.77, 0.86],
        [0.44, 0.56, 0.64, 0.79, 0.93, 0.98],
        [0.48, 0.60, 0.62, 0.71, 0.85, 0.94],
        [0.50, 0.61, 0.67, 0.82, 0.92, 0.98],
        [0.52, 0.60, 0.72, 0.77, 0.81, 0.97],
        [0.56, 0.67, 0.67, 0.87, 0.93, 0.99],
        [0.64, 0.68, 0.73, 0.82, 0.80, 0.95],
        [0.64, 0.73, 0.70, 0.88, 0.93, 0.98],
        [0.70, 0.70, 0.76, 0.72, 0.86, 0.98],
        [0.72, 0.75, 0.81, 0.86, 0.94, 0.98],
        [0.76, 0.78, 0.78, 0.71, 0.86, 0.96],
        [0.81, 0.88, 0.84, 0.82, 0.93, 0.97],
        [0.79, 0.77, 0.78, 0.69, 0.86, 0.96],
        [0.84, 0.83, 0.81, 0.88, 0.97, 0.99],
        [0.83, 0.81, 0.85, 0.84, 0.93, 0.94],
        [0.99, 0.99, 0.99, 0.99, 0.99, 0.99],
    ],
    dtype=np.float32,
).ravel()

# By tokens matched up to the parent (1, 2, -4, -8, -16, -32, more), one row each. Columns: share of
# the parent's occurrences, below 0.05, -0.1, -0.2, -0.4, -0.6, -0.8, below 1, 1; and a parent that
# occurred once.
TREE_PRIORS = np.array(
    [
        [0.03, 0.05, 0.09, 0.14, 0.20, 0.44, 0.66, 0.36, 0.13],
        [0.02, 0.05, 0.10, 0.16, 0.23, 0.38, 0.71, 0.60, 0.24],
        [0.03, 0.05, 0.08, 0.15, 0.24, 0.42, 0.72, 0.75, 0.37],
        [0.04, 0.05, 0.09, 0.15, 0.27, 0.44, 0.73, 0.81, 0.57],
        [0.02, 0.05, 0.07, 0.13, 0.26, 0.50, 0.84, 0.93, 0.82],
        [0.02, 0.04, 0.09, 0.22, 0.30, 0.50, 0.77, 0.97, 0.90],
        [0.02, 0.04, 0.09, 0.31, 0.32, 0.50, 0.76, 0.97, 0.97],
    ],
    dtype=np.float32,
).ravel()
