"""What is known of how much contexts are worth, before a text has shown it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from ..structures.suffix_tree import CELL_SHAPE, COPY_SHAPE, WEIGHT_SHAPE, Mixer
from ..token_tree import Float32Array

# Share of a context's continuations, at the middle of each bucket; no continuation is the first,
# and the last: no continuation, where the context always went on alike.
_SHARES = (0.005, 0.01, 0.04, 0.1, 0.22, 0.4, 0.6, 0.85, 0.95, 0.005)

# That a copy goes on, by how long it has been going on.
_COPIED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)

_TRIALS_KEPT = 20  # of each cell, from training to another text


@dataclass(frozen=True)
class Mixture:
    """State of a `Mixer`.

    Attributes:
        cells: float32 [*CELL_SHAPE, 2], probabilities of evidence and the trials behind them.
        copy_cells: float32 [*COPY_SHAPE, 2], the same of what copies name.
        weights: float32 WEIGHT_SHAPE.
        rate: by which the weights follow a text.
    """

    cells: Float32Array
    copy_cells: Float32Array
    weights: Float32Array
    rate: float = 0.002

    @classmethod
    def untrained(cls) -> Mixture:
        """Every context counts alike, and is right as often as it was before."""
        cells = np.zeros((*CELL_SHAPE, 2), np.float32)
        trust = 0.5 + 0.08 * np.arange(CELL_SHAPE[2])
        cells[..., 0] = (trust[:, None] * _SHARES)[..., None]
        copy_cells = np.zeros((*COPY_SHAPE, 2), np.float32)
        copy_cells[..., 0] = 0.05, 0.5
        going_on = np.repeat(_COPIED, COPY_SHAPE[1] // len(_COPIED))
        copy_cells[0, :, :, 0] = np.stack([(1 - going_on) / 10, going_on], 1)
        weights = np.zeros(WEIGHT_SHAPE, np.float32)
        weights[0, :-2] = 0.12
        return cls(cells, copy_cells, weights)

    @classmethod
    def load(cls, path: Path) -> Mixture:
        """Read what `save` wrote; ValueError where the shapes are not this version's."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(arrays["cells"], arrays["copy_cells"], arrays["weights"])

    @classmethod
    @cache
    def trained(cls) -> Mixture:
        """Trained on recorded texts: chat, programs, mathematics, SQL, edits of files."""
        with as_file(files(__package__) / "mixture.npz") as path:
            return cls.load(path)

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path, cells=self.cells, copy_cells=self.copy_cells, weights=self.weights
        )

    def doubted(self) -> Mixture:
        """The same, tried so little that another kind of text soon moves it."""
        cells, copies = self.cells.copy(), self.copy_cells.copy()
        for found in (cells, copies):
            found[..., 1] = np.minimum(found[..., 1], _TRIALS_KEPT)
        return replace(self, cells=cells, copy_cells=copies)

    def mixer(self) -> Mixer:
        """A mixer that starts from here."""
        return Mixer(self.cells, self.copy_cells, self.weights, self.rate)
