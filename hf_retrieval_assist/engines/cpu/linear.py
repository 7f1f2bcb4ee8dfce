"""Linear layers of few rows on a CPU, computed by whichever method is fastest on this machine.

Products of 1 to 65 rows, a token and 64 drafts, are computed by one of

* `kernel`: :func:`skinny_linear`, which reads the weights once for all rows,
* `transposed`: `(W @ x.T).T`, for which BLAS libraries often have the better code,
* `pytorch`: what would have run anyway.

One method serves a weight shape, dtype and number of threads for every number of rows, chosen when
that shape is first met; weights of less than `LEAST_ELEMENTS` are the kernel's. Where it is the
kernel (bits do not depend on rows there), a token's logits do not depend on how many draft tokens
are verified beside it; neither is promised of the others. Prompts of more than `FEW_ROWS` rows,
which plain decoding feeds at once as well, have a choice of their own: PyTorch's products take a
third of the kernel's time where the CPU multiplies tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import nn

from ...system.tensors import thread
from .library_weights import library_linear
from .recording import PackedWeight, overrides
from .skinny import (
    FEW_ROWS,
    MAX_ROWS,
    RepeatedLinears,
    chosen_method,
    in_route,
    kernel_linear,
    routed_linear,
    set_chooser,
    skinny_linear,
)
from .tuning import Candidates, Tuning, fastest

__all__ = ["MAX_ROWS", "METHODS", "LinearTuning", "is_kernel", "linear", "plain_linear"]

LinearMethod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, weight, bias) -> `x @ weight.T + bias`."""

plain_linear = torch._C._nn.linear

# Numbers of rows that a choice is made for, and what is timed for each: so much of the weight, or
# so many copies of a smaller one in turn, that each has left the second-level caches when it is
# read again, as it has between two forwards; behind layers of the kernel's, as in a forward:
# PyTorch's own products then take up to half as long again as one after another.
TUNING_ROWS = (1, 2, 4, FEW_ROWS)
PROMPT_ROWS = (48,)
TUNING_BYTES = 64 << 20
MAX_COPIES = 64
LAYERS_BEFORE = 4

# Smaller weights stay in the second-level cache between two forwards. The kernel then takes as long
# for one row as PyTorch, and for several, above all in half precision, a half or less.
LEAST_ELEMENTS = 1 << 17
LEAST_OF_PROMPTS = 1 << 15


# The types of weights whose values are what lies in memory.
_DENSE = (nn.Parameter, torch.Tensor)


def transposed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ weight.T + bias` with the weight as the left factor. Returns [..., out_features].

    Contiguous, as PyTorch's own: what comes next would pay for another layout.
    """
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        product = torch.mm(weight, rows.T)
    else:
        product = torch.addmm(bias[:, None], weight, rows.T)
    return product.T.contiguous().view(*x.shape[:-1], weight.shape[0])


METHODS: dict[str, LinearMethod] = {
    "kernel": kernel_linear,
    "transposed": transposed_linear,
    "pytorch": plain_linear,
}


def _copies(weight: torch.Tensor) -> torch.Tensor:
    """[copies, rows, in_features]: TUNING_BYTES of the weight, repeated where it has less."""
    row_bytes = weight.shape[1] * weight.element_size()
    part = weight.detach()[: max(1, TUNING_BYTES // row_bytes)]
    count = TUNING_BYTES // (part.shape[0] * row_bytes)
    return part.repeat(min(max(1, count), MAX_COPIES), 1, 1)


def _behind_others(
    method: LinearMethod,
    x: torch.Tensor,
    others: torch.Tensor,
    weights: Iterator[torch.Tensor],
) -> torch.Tensor:
    for other in others:
        kernel_linear(x, other, None)
    return method(x, next(weights), None)


def _cases(weight: torch.Tensor, prompt: bool) -> Iterator[Candidates]:
    weights, (_, columns) = cycle(_copies(weight)), weight.shape
    # Layers before one of a prompt take no less time than itself, and may be of any method.
    shape = 0 if prompt else LAYERS_BEFORE, -(-2 * LEAST_ELEMENTS // columns), columns
    others = torch.ones(shape, dtype=weight.dtype)
    for n in PROMPT_ROWS if prompt else TUNING_ROWS:
        x = torch.ones(n, columns, dtype=weight.dtype)
        candidates = METHODS | {"serial": partial(skinny_linear, threads=1)}
        yield {
            name: partial(_behind_others, method, x, others, weights)
            for name, method in candidates.items()
        }


def fastest_method(weight: torch.Tensor, prompt: bool = False) -> str | None:
    """The name in METHODS of the fastest over TUNING_ROWS, or PROMPT_ROWS; None on a machine too
    busy to tell."""
    with torch.no_grad():
        return fastest(_cases(weight, prompt))


class LinearTuning(Tuning):
    """The methods chosen for weights on this machine.

    Args:
        path: the file; by default `linear_tuning.json` in the user's cache directory.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(METHODS, "linear", path)

    def choose(self, weight: torch.Tensor, prompt: bool = False) -> LinearMethod:
        """The method for weights of this shape and dtype at the present number of threads; or the
        one for more than `FEW_ROWS` rows of a prompt."""
        if weight.numel() < (LEAST_OF_PROMPTS if prompt else LEAST_ELEMENTS):
            return kernel_linear
        rows, columns = weight.shape
        key = f"{weight.dtype} {rows}x{columns} threads={torch.get_num_threads()}"
        key += " prompts" * prompt
        return METHODS[self.name(key, lambda: fastest_method(weight, prompt))]


def is_kernel(weight: torch.Tensor) -> bool:
    """Whether the kernel, whose bits do not depend on rows, serves a weight."""
    return TUNING.choose(weight) is kernel_linear


TUNING = LinearTuning()
set_chooser(TUNING.choose)


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What stands for `torch.nn.functional.linear`: plain Python, so that `torch.compile` can trace
    it, which then puts PyTorch's own into the graph.
    """
    if torch.compiler.is_compiling():
        return plain_linear(input, weight, bias)
    if (recording := thread.recorder) is not None:
        return recording.linear(linear, RepeatedLayers, input, weight, bias)
    override = overrides.by_id.get(id(weight))
    if override is not None and in_route():
        return override(input, bias)
    if type(weight) in _DENSE:
        return routed_linear(input, weight, bias)
    return library_linear(input, weight, bias)


linear.stands_for = plain_linear  # type: ignore[attr-defined]


Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""x, weight, bias, result."""


class RepeatedLayers:
    """Linear layers of the same x, computed anew by every call where their results lie.

    Attributes:
        weights: the identities of theirs.
        layers: of each x, weight, bias and result.
    """

    def __init__(self) -> None:
        self.weights: set[int] = set()
        self.layers: list[Layer] = []
        self._kernels: RepeatedLinears | None = None

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> bool:
        """Compute one more; False: it is none of those that can be computed together."""
        layer = x, weight, bias, out
        kernel = chosen_method(x, weight, bias) is kernel_linear
        # The kernel reads a copy of a bias that does not lie in a row.
        kernel = kernel and (bias is None or bias.is_contiguous())
        if not self.layers:
            with suppress(ValueError):
                self._kernels = RepeatedLinears(*layer) if kernel else None
        elif not (kernel and self._kernels is not None and self._kernels.add(*layer)):
            return False
        self.layers.append(layer)
        self.weights.add(id(weight))
        return True

    @property
    def x(self) -> torch.Tensor:
        """What they read."""
        return self.layers[0][0]

    @property
    def out(self) -> torch.Tensor:
        """What the first one gives."""
        return self.layers[0][3]

    def moved(self, layers: list[Layer]) -> RepeatedLayers:
        """The same of tensors that lie elsewhere."""
        found = RepeatedLayers()
        found.weights, found.layers, found._kernels = self.weights, layers, self._kernels
        [found._kernels] = found.packed({}) or [None]
        return found

    @property
    def direct(self) -> Callable[[], None]:
        """The same where nothing stands for a weight."""
        return self if self._kernels is None else self._kernels

    def packed(self, packed: Mapping[int, PackedWeight]) -> list[RepeatedLinears] | None:
        """The same where others, in few bits, stand for some of the weights, by their identities;
        None where the kernel does not compute it."""
        if self._kernels is None:
            return None
        found: list[RepeatedLinears] = []
        for x, weight, bias, out in self.layers:
            layer = x, weight, bias, out, packed.get(id(weight))
            if not (found and found[-1].add(*layer)):
                found.append(RepeatedLinears(*layer))
        return found

    def __call__(self) -> None:
        if self._kernels is not None and self.weights.isdisjoint(overrides.by_id):
            self._kernels()
            return
        for x, weight, bias, out in self.layers:
            out.copy_(linear(x, weight, bias))


Override = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, bias) -> `x @ weight.T + bias`, of the weight that it stands for, or nearly so."""
