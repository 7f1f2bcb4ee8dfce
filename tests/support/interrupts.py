"""Calls that are interrupted as a user's Ctrl-C does it."""

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


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
