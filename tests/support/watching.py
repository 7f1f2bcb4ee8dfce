"""What notes what models and functions do without changing it, and what interrupts them."""

import sys
from contextlib import contextmanager
from functools import wraps

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


def calls_of(monkeypatch, owner, name):
    """The positional arguments of every call of a function from now on."""
    calls, function = [], getattr(owner, name)

    @wraps(function)
    def noted(*arguments, **options):
        calls.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, noted)
    return calls


@contextmanager
def profiled(see):
    """Scope in which Python tells a function of every call and return."""
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


class Fed:
    """Scope that notes the shapes of the ids that a model is fed.

    A hook of the model's own would be part of what its forwards are tested with.
    """

    def __init__(self, model):
        self.embeddings = model.get_input_embeddings()
        self.shapes = []

    def __enter__(self):
        self.handle = register_module_forward_pre_hook(self.note)
        return self.shapes

    def note(self, module, args):
        if module is self.embeddings:
            self.shapes.append(tuple(args[0].shape))

    def __exit__(self, *error):
        self.handle.remove()


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


class InterruptedForward:
    """Scope in which a block of the model raises at its n-th forward, the last one if not told."""

    def __init__(self, model, forwards, block=-1):
        self.left = forwards
        decoder = model.get_decoder() if model.config.is_encoder_decoder else model
        blocks = next(m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList))
        self.block = blocks[block]
        # A hook of the model's own would be another model's to the self-test.
        self.handle = register_module_forward_pre_hook(self.count)

    def count(self, module, args):
        self.left -= module is self.block
        if self.left < 0:
            raise Interrupt

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.handle.remove()
