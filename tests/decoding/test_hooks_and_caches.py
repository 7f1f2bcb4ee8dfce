"""Hooks of the model's caller that are shown the call's cache, or hold it."""

from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache

from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import PROMPT, build, equal, knowing, run, same

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


@pytest.mark.parametrize(("spoil", "known"), [(evict, False), (blank, True)])
@pytest.mark.parametrize("place", SHOWN.values(), ids=SHOWN)
def test_hooks_that_are_shown_the_cache(place, spoil, known):
    model = build()
    if known:  # there is no test in the first call with the hook then
        equal(model)
    unhooked, handle = run(model), place(model, Press(spoil))
    try:
        plain, _, _ = same(model, calls=3, tier="plain")
    finally:
        handle.remove()
    assert not torch.equal(plain, unhooked)
    if place not in (SHOWN["by position"], SHOWN["a module that takes anything"]):
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
