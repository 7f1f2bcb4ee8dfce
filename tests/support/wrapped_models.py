"""Models whose weights are adapted, elsewhere, or in eight bits."""

from types import SimpleNamespace

import pytest
import torch


def with_lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def offloaded(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, torch.device("cpu"))


class Int8Linear(torch.nn.Module):
    """A linear layer whose weights are kept as int8 with one scale a row."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight / scale).round().to(torch.int8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale)


def quantised(model):
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in linear:
        model.set_submodule(name, Int8Linear(model.get_submodule(name)))
    return model


WRAPS = (with_lora, offloaded, quantised)


class Around(torch.nn.Module):
    """A part of a model, whose output a function changes.

    Args:
        change: given the output and this module.
        held: what `change` may count with; no settings, by which models are told apart.
    """

    def __init__(self, part, change, **held):
        super().__init__()
        self.part, self.change, self.held = part, change, SimpleNamespace(**held)
        self.weight = getattr(part, "weight", None)

    def forward(self, x):
        return self.change(self.part(x), self.held)
