"""What was found out with a hook of the caller's is not believed of another, or of new values."""

from functools import partial

import pytest
import torch

from hf_retrieval_assist.verification import service
from tests.support.lossless import build, equal, same
from tests.support.watching import results_of


class Bound:
    """Gives a hook in another form, as what is bound to one."""

    def __init__(self, scale):
        self.scale = scale

    def __repr__(self):
        raise RuntimeError("expected nobody to ask")

    def hook(self, factor, module, args, out):
        return out + self.scale * factor * args[0].flip(1)

    def __call__(self, *shown):
        return self.hook(1, *shown)


def mixes(scale, module, args, out):
    return out + float(scale["by"] if isinstance(scale, dict) else scale) * args[0].flip(1)


BOUND = {
    "a number": lambda scale: partial(mixes, scale),
    "a tensor": lambda scale: partial(mixes, torch.tensor(float(scale))),
    "a dictionary": lambda scale: partial(mixes, {"by": scale}),
    "a method": lambda scale: partial(Bound(scale).hook, 1),
    "an object": lambda scale: partial(Bound(scale)),
    "nested": lambda scale: partial(partial(Bound(scale).hook), 1),
    "a closure": lambda scale: lambda *shown: mixes(scale, *shown),
}


@pytest.mark.parametrize("bind", BOUND.values(), ids=BOUND)
def test_hooks_are_told_by_what_they_call_and_keep(bind):
    """What was found out of a hook that changes nothing is not believed of another in its place."""
    model = build()
    mlp = model.model.layers[1].mlp
    for scale in (0, 1, 0, 1):
        for _ in range(3):
            handle = mlp.register_forward_hook(bind(scale))
            same(model)
            handle.remove()


def test_what_a_hook_reads_changes_between_calls():
    model, scale, bound = build(), torch.zeros(4), Bound(0)
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _, args, out: out + scale[2] * args[0].flip(1))
    mlp.register_forward_hook(bound)
    _, _, assistant = same(model, calls=3)
    assert assistant.stats.last.accepted > 0
    scale[2] = 1
    same(model)
    scale[2], bound.scale = 0, 1
    same(model)


def test_another_function_at_the_address_of_one():
    model = build()
    mlp, others = model.model.layers[1].mlp, []
    once = lambda scale, module, args, out: out * 1.0  # noqa: E731
    address, handle = id(once), mlp.register_forward_hook(partial(once, 3))
    same(model, calls=2)
    handle.remove()
    del once, handle
    while not others or (id(others[-1]) != address and len(others) < 1 << 12):
        others.append(lambda scale, module, args, out: out + args[0].flip(1))
    mlp.register_forward_hook(partial(others[-1], 3))
    same(model, calls=2)


def test_a_hook_that_is_registered_for_every_call_is_tested_once(monkeypatch):
    model, tests = build(), results_of(monkeypatch, service, "examined")
    equal(model)
    for number in range(6):
        handle = model.model.layers[1].mlp.register_forward_hook(
            partial(Bound.hook, Bound(0), torch.tensor(0.5)) if number % 2 else partial(mixes, 0.0)
        )
        same(model)
        handle.remove()
    assert len(tests) == 2
    _, _, assistant = same(model)
    assert assistant.stats.last.accepted > 0
