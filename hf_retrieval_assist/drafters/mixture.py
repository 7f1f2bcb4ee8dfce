"""What is known of how much contexts are worth, before a text has shown it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from ..structures.suffix_tree import Mixer
from ..token_tree import Float32Array


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

    def mixer(self) -> Mixer:
        """A mixer that starts from here."""
        return Mixer(self.cells, self.copy_cells, self.weights, self.rate)
