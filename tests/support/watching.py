"""What notes what models and functions do without changing it, and what interrupts them."""

import sys
from contextlib import contextmanager
from functools import wraps
from types import FunctionType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


def results_of(monkeypatch, owner, name, say=lambda result, *_, **__: result):
    """The results of a function from now on, or what `say` makes of each and of its arguments."""
    results, function = [], getattr(owner, name)

    @wraps(function)
    def noted(*arguments, **options):
        result = function(*arguments, **options)
        results.append(say(result, *arguments, **options))
        return result

    monkeypatch.setattr(owner, name, noted)
    return results


def calls_of(monkeypatch, owner, name):
    """The positional arguments of every call of a function from now on."""
    return results_of(monkeypatch, owner, name, lambda result, *arguments, **_: arguments)


def a_librarys(function):
    """The same function, as if transformers had written it: a caller's own would not be known."""
    names = {**function.__globals__, "__name__": "transformers.written_for_a_test"}
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


@contextmanager
def profiled(see):
    """Scope in which Python tells a function of every call and return."""
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def of_library(hook):
    """A hook as a library's, which is neither watched nor part of what forwards are tested with."""
    own = hook.__globals__ | {"__name__": torch.__name__}
    return FunctionType(hook.__code__, own, closure=hook.__closure__)


@contextmanager
def _before_forwards(see):
    """Scope in which a function is called before the forward of any module."""
    handle = register_module_forward_pre_hook(of_library(see))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def fed_shapes(model):
    """Scope that notes the shapes of the ids that a model is fed."""
    embeddings, shapes = model.get_input_embeddings(), []

    def note(module, args):
        if module is embeddings:
            shapes.append(tuple(args[0].shape))

    with _before_forwards(note):
        yield shapes


class Spectator:
    """A streamer that remembers what it is sent."""

    def __init__(self):
        self.sent = []

    def put(self, value):
        self.sent.append(value.tolist())

    def end(self):
        self.sent.append("end")


class Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises wherever the call is."""


@contextmanager
def interrupted_forward(model, forwards, block=-1):
    """Scope in which a block of the model raises at its n-th forward, the last one if not told."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    blocks = next(m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList))

    def count(module, args):
        nonlocal forwards
        forwards -= module is blocks[block]
        if forwards < 0:
            raise Interrupt

    with _before_forwards(count):
        yield
