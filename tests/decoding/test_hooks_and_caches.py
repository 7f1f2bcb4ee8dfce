"""Hooks of the model's caller that are shown the call's cache, or hold it; what was found out with
one is not believed of another, or of new values."""

from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache

from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import PROMPT, build, equal, knowing, run, same
from tests.support.quick import cases, crossed

TENTH = PROMPT.shape[1] + 10


def evict(cache):
    """Forget old tokens from some length on, as the compression of caches does while decoding."""
    for layer in cache.layers:
        if layer.get_seq_length() > TENTH:
            layer.keys, layer.values = layer.keys[..., -9:, :], layer.values[..., -9:, :]


def blank(cache):
    """The same in place."""
    for layer in cache.layers:
        if layer.get_seq_length() > TENTH:
            layer.values[..., :9, :] *= 0


class Press:
    def __init__(self, spoil):
        self.spoil = spoil

    def __call__(self, module, args, kwargs, *output):
        self.spoil(kwargs[CACHE])

    def note(self, scale, module, args, kwargs, output):
        return self(module, args, kwargs, output)

    def returned(self, module, args, output):
        if CACHE in output:
            self.spoil(output[CACHE])
        return output

    @torch.no_grad()
    def in_any(self, module, args, output):
        if hasattr(output, CACHE):
            self.spoil(output[CACHE])

    @torch.no_grad()
    def in_any_with(self, module, args, kwargs, output):
        if kwargs.get(CACHE) is not None:
            self.spoil(kwargs[CACHE])


class Nothing(torch.nn.Module):
    def forward(self, *args):
        pass


class Passing(torch.nn.Module):
    """Hands on what it is given in another form than transformers' modules do."""

    def __init__(self, inner, positional):
        super().__init__()
        self.inner, self.part = inner, Nothing()
        self.positional = positional

    def forward(self, *args, **kwargs):
        if self.positional:
            self.part(None, kwargs[CACHE])
        return self.inner(*args, **kwargs)


def passing(model, press, positional):
    first = model.model.layers[0]
    first.self_attn = Passing(first.self_attn, positional)
    if positional:
        return first.self_attn.part.register_forward_pre_hook(
            lambda module, args: press.spoil(args[1])
        )
    return first.self_attn.register_forward_hook(press, with_kwargs=True)


SHOWN = {
    "attention": lambda m, press: m.model.layers[1].self_attn.register_forward_hook(
        press, with_kwargs=True
    ),
    "attention, before": lambda m, press: m.model.layers[1].self_attn.register_forward_pre_hook(
        torch.no_grad()(press.__call__), with_kwargs=True
    ),
    "layer": lambda m, press: m.model.layers[1].register_forward_hook(
        partial(press.note, 1), with_kwargs=True
    ),
    "decoder": lambda m, press: m.model.register_forward_hook(press.returned),
    "model": lambda m, press: m.register_forward_hook(press.returned),
    "all modules": lambda m, press: register_module_forward_hook(press.in_any),
    "all modules, keywords": lambda m, press: register_module_forward_hook(
        press.in_any_with, with_kwargs=True
    ),
    "a module that takes anything": partial(passing, positional=False),
    "by position": partial(passing, positional=True),
}


SPOILT = {"evicted": evict, "blanked": blank}


@pytest.mark.parametrize(("name", "spoilt"), cases(crossed(SHOWN, SPOILT), 2))
def test_hooks_that_are_shown_the_cache(name, spoilt):
    model, place, spoil = build(), SHOWN[name], SPOILT[spoilt]
    if spoilt == "blanked":  # there is no test in the first call with the hook then
        equal(model)
    unhooked, handle = run(model), place(model, Press(spoil))
    try:
        plain, _, _ = same(model, calls=3, tier="plain")
    finally:
        handle.remove()
    assert not torch.equal(plain, unhooked)
    if name not in ("by position", "a module that takes anything"):
        equal(model)


def test_hooks_that_hold_the_cache_of_the_call():
    model, texts = build(), []
    held = DynamicCache(config=model.config)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: evict(held))
    for options in ({}, {"assistant": knowing(run(model))}):
        held = DynamicCache(config=model.config)
        texts.append(run(model, **{CACHE: held}, **options))
    assert torch.equal(*texts)
    assert options["assistant"].stats.last.tier == "plain"
    assert not torch.equal(texts[0], run(model))


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
    "nested": lambda scale: partial(partial(Bound(scale).hook), 1),
    "a number": lambda scale: partial(mixes, scale),
    "a tensor": lambda scale: partial(mixes, torch.tensor(float(scale))),
    "a dictionary": lambda scale: partial(mixes, {"by": scale}),
    "a method": lambda scale: partial(Bound(scale).hook, 1),
    "an object": lambda scale: partial(Bound(scale)),
    "a closure": lambda scale: lambda *shown: mixes(scale, *shown),
}


@pytest.mark.parametrize("bind", cases(BOUND.values()), ids=BOUND)
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


def test_a_hook_that_is_registered_for_every_call_is_tested_once(tests):
    model = build()
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
