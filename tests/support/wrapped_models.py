"""Models whose weights are adapted, elsewhere, or in eight bits, whose forwards are another
runtime's, or whose attention takes no masks."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationMixin

from .int8_weight import in_eight_bits


def with_lora(model, *names, **settings):
    """The model with an adapter of each name, the first in use; without names it has one."""
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False} | settings
    config, (first, *others) = peft.LoraConfig(**settings), names or ("default",)
    wrapped = peft.get_peft_model(model, config, adapter_name=first)
    for name in others:
        wrapped.add_adapter(name, config)
    return wrapped.eval()


def offloaded(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, torch.device("cpu"))


class Runtime(GenerationMixin):
    """What brings `generate` and is no module, as Optimum's models for ONNX and OpenVINO."""

    main_input_name, name_or_path, training, _is_stateful = "input_ids", "", False, False

    def __init__(self, model):
        self.model, self.config, self.device = model, model.config, model.device
        self.generation_config = model.generation_config

    def __call__(self, *inputs, **options):
        return self.forward(*inputs, **options)

    def can_generate(self):
        return True

    def is_remote_code(self):
        return False

    def get_experts_implementation(self):
        return {}

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **options):
        mask = {"attention_mask": attention_mask, "position_ids": position_ids}
        return self.model(input_ids=input_ids, **mask, **options)


class RuntimeWithDtype(Runtime):
    dtype = torch.float32


class RuntimeWithoutHash(Runtime):
    __hash__ = None


RUNTIMES = (Runtime, RuntimeWithDtype, RuntimeWithoutHash)


def _stepped(x, largest):
    step = largest / 127
    return (x / step).round() * step


ROUNDINGS = {
    "a scale for each row": lambda x: _stepped(x, x.abs().amax(-1, keepdim=True)),
    "one scale for all rows": lambda x: _stepped(x, x.abs().max()),
    "a calibrated scale": lambda x: _stepped(x, 4.0),
    "bfloat16": lambda x: x.bfloat16().to(x.dtype),
}


WRAPS = (with_lora, offloaded, in_eight_bits)


class Held:
    """What it is given, by attribute; told by which one it is."""

    def __init__(self, **held):
        vars(self).update(held)


class Around(torch.nn.Module):
    """A part of a model, whose output a function changes, given it and what it may count with: no
    settings, by which models are told apart."""

    def __init__(self, part, change, **held):
        super().__init__()
        self.part, self.change, self.held = part, change, Held(**held)
        self.weight = getattr(part, "weight", None)

    def forward(self, x):
        return self.change(self.part(x), self.held)


def rounding_activations(model, rounded, names=("",)):
    """Let linear layers round what they multiply: those in whose names there is one of `names`."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, torch.nn.Linear) and any(part in name for part in names):
            model.set_submodule(
                name,
                torch.nn.Sequential(Around(torch.nn.Identity(), lambda x, _: rounded(x)), layer),
            )
    return model


def flash_like(module, query, key, value, attention_mask, scaling, **options):
    """Attends causally and takes no mask of four dimensions, as flash attention does."""
    assert attention_mask is None
    width, length, sharing = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    seen = torch.ones(width, length, dtype=torch.bool).tril(length - width)
    key, value = (x.repeat_interleave(sharing, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling)
    return out.transpose(1, 2), None
