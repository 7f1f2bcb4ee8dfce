"""How far apart numbers may be that were summed in different orders."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

# Terms behind what a tiny model computes: of each layer's products and of attention over its text.
OF_MODEL = 1000


def rounding(dtype=torch.float32, terms=1, scale=1.0):
    """The largest difference between two sums of so many terms, rounded to a dtype.

    Sums of half precision are taken in float32, as PyTorch and the kernels take them.

    Args:
        terms: of each sum, and of those before it whose results it takes.
        scale: of the terms' magnitudes, added up.
    """
    unit = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
    summed = min(unit, 2.0**-24)
    return 2 * (terms * summed + unit) * scale


def within(expected, terms, scale=None):
    """Tolerances for `torch.testing.assert_close` to such sums.

    Args:
        expected: a tensor, or a collection of some.
        terms: see :func:`rounding`.
        scale: see :func:`rounding`; None: terms that make up sums as large as the largest one.
    """
    tensors = [x for x in tree_leaves(expected) if isinstance(x, torch.Tensor)]
    if scale is None:
        finite = [x.double().nan_to_num(0.0, 0.0, 0.0).abs() for x in tensors if x.numel()]
        scale = max((float(x.max()) for x in finite), default=0.0)
    return {"atol": max((rounding(x.dtype, terms, scale) for x in tensors), default=0.0), "rtol": 0}


def near(expected, terms=16):
    """Figures that equal these but for the rounding of a few operations in float32."""
    return pytest.approx(expected, rel=rounding(terms=terms), abs=rounding(terms=terms))
