"""The scope in which a model's forwards run by the kernels for few rows.

Within :class:`reroute` the running thread's linear layers (`torch.nn.functional.linear`) and
transformers' `sdpa` attention function are computed by kernels where rows are few; see
:mod:`linear` and :mod:`attention`. Norms of known models take one operation; see :mod:`norms`.

The functions are exchanged where modules look them up while any thread is in a scope, and put back
after the last one. Code outside of scopes, other threads among it, then reaches the plain functions
through one extra call. A mode (`torch.overrides.TorchFunctionMode`) would need no exchange, but it
taxes every operator of a forward, ten for each linear, and not only the linears.

Forwards are not compiled. With `torch.compile` (inductor, dynamic shapes) two layers of
Gemma-3-270M on a CPU took half a minute of processor time to compile, for one row and for several
apart, and then as long as before; the kernels, which a compiled graph does not call, take two
thirds of that. A model that comes compiled is served as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from ...host.scopes import OUTSIDE, ROUTES, Exchange, innermost, register, scopes_left
from . import norms, skinny
from .attention import attention, plain_attention
from .linear import Override, linear, overrides, plain_linear
from .skinny import route_depth, set_route_depth, set_verifies, verifies


def _put() -> None:
    if skinny.PATHS and F.linear is plain_linear:
        F.linear = linear
    norms.put()


def _restore() -> None:
    if F.linear is linear:
        F.linear = plain_linear
    norms.restore()


_exchange = Exchange(_put, _restore)

_NAME = "sdpa"  # transformers' for the attention that the kernel computes
OUTSIDE[plain_attention] = attention
ROUTES.append(lambda name: name == _NAME and route_depth() > 0)


def _go_to(depth: int, verifying: bool) -> None:
    """Let the running thread be in so many scopes, and verify drafts there or not."""
    _exchange.want(depth > 0)
    register(_NAME, innermost(), depth > 0)
    set_route_depth(depth)
    set_verifies(verifying)


@contextmanager
def all_scopes_left() -> Iterator[None]:
    """Scope at whose end the running thread is in the scopes that it was in before, those of the
    kernels included; see :func:`~...host.scopes.scopes_left`."""
    before, outer = (route_depth(), verifies()), overrides.by_id
    try:
        with scopes_left():
            yield
    finally:
        overrides.by_id = outer
        _go_to(*before)


def _is_traced() -> bool:
    """Whether operators are being written down, for which scopes do nothing. Modes that watch or
    replace operators are looked for at each of them, as they begin and end within scopes."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


class reroute:  # noqa: N801, a context manager reads as a verb
    """Scope in which this thread's linears of 1 to 16 rows, and attention of as many queries, run
    by kernels made for few rows; more, as those of a longer prompt, run as always, but for linears
    in bfloat16 and float16 on CPUs without instructions for these, and for up to 65 rows by AMX.

    An assistant's forwards run in such a scope already. Plain decoding inside of one rounds as they
    do: where the kernels serve, logits do not depend on how many tokens a forward processes, so
    that plain and assisted outputs agree in bfloat16 and float16 as well.

    Only operators on dense CPU tensors that are exactly `torch.Tensor` or `Parameter`, in float32,
    bfloat16 or float16, outside of autograd, autocast and function transforms are touched, and
    linears whose weights torchao, optimum-quanto or the like keep as int8 with a scale for each row
    (see :mod:`library_weights`); all others (weights in other forms, sparse or offloaded ones,
    `torch.compile` graphs) run as always. Scopes nest and may be entered again. Inside a mode that
    watches operators, such as a FLOP counter, a scope does nothing, and a function that somebody
    else has replaced stays.

    Args:
        enabled: False makes it a scope that does nothing.
        verifying: whether up to 65 rows run so, of a few texts whose drafts are verified.
    """

    def __init__(self, enabled: bool = True, *, verifying: bool = False) -> None:
        self.enabled, self.verifying = enabled, verifying
        self._outer: list[tuple[int, bool] | None] = []  # None: nothing was done

    def __enter__(self) -> reroute:
        active, before = self.enabled and not _is_traced(), (route_depth(), verifies())
        self._outer.append(before if active else None)
        if active:
            _go_to(before[0] + 1, before[1] or self.verifying)
        return self

    def __exit__(self, *error: object) -> None:
        if (before := self._outer.pop()) is not None:
            _go_to(*before)


@contextmanager
def overriding(others: Mapping[int, Override]) -> Iterator[None]:
    """Scope in which `others`, and nothing else, stand for weights of this thread's linear layers,
    wherever it is in a scope of :class:`reroute`.

    They are called for what `torch.nn.functional.linear` is given with a weight of that identity.
    Nothing is stored on the model, and other threads see nothing of it. Inside a mode that watches
    operators it does nothing, as `reroute`.
    """
    outer = overrides.by_id
    try:
        if not _is_traced():
            overrides.by_id = others
        yield
    finally:
        overrides.by_id = outer
