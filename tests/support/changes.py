"""What callers change of a Llama, within a call or between two: each a scope in which it is so."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


@contextmanager
def exchanged(owner, name, change):
    """Scope in which an attribute is what `change` makes of it; methods are inherited again."""
    before = getattr(owner, name, None)
    inherited = callable(before) and not isinstance(before, nn.Module | type)
    inherited &= name not in vars(owner)
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        delattr(owner, name) if inherited else setattr(owner, name, before)


@contextmanager
@torch.no_grad()
def written(tensor):
    """Scope in which the numbers of a tensor are others, as PyTorch counts writes."""
    tensor.mul_(4.0)
    try:
        yield
    finally:
        tensor.mul_(0.25)


@contextmanager
def hooked(register, hook=lambda module, arguments, out: out * 2):
    """Scope in which a hook is registered."""
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def swapped(layers):
    layers[0], layers[1] = layers[1], layers[0]
    try:
        yield
    finally:
        layers[0], layers[1] = layers[1], layers[0]


def shortened(model):
    """Scope in which a model has fewer layers, and says so."""
    scopes = ExitStack()
    scopes.enter_context(exchanged(model.model, "layers", lambda layers: layers[:2]))
    scopes.enter_context(exchanged(model.config, "num_hidden_layers", lambda _: 2))
    return scopes


OTHERS = torch.linspace(-2, 2, 64)


class Mirrored(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).flip(-1)


def stretched(rope):
    return lambda q, k, *more, **options: rope(q * 4, k, *more, **options)


def uniform(attention):
    return lambda module, query, *more, **o: attention(module, query * 0.1, *more, **o)


def scaled(function, by):
    return lambda *args, **options: function(*args, **options) * by


def louder(call):
    """`Module.__call__` of all modules, whose results are others for some."""

    def called(module, *arguments, **options):
        found = call(module, *arguments, **options)
        return found * 1.5 if isinstance(module, LlamaMLP) else found

    return called


def forgetting(prepare):
    """The inputs of each step, whose ids are always the same."""

    def prepared(input_ids, attention_mask=None, **options):
        made = prepare(input_ids, attention_mask=attention_mask, **options)
        return made | {"input_ids": torch.full_like(made["input_ids"], 7)}

    return prepared


def first(model):
    return model.model.layers[0]


# Forwards can be recorded anew after these.
RECORDABLE = {
    "a setting": lambda m: exchanged(first(m).self_attn, "scaling", lambda x: x * 4),
    "weights in place": lambda m: written(first(m).mlp.down_proj.weight),
    "weights' memory": lambda m: exchanged(first(m).mlp.up_proj.weight, "data", lambda x: x * 3),
    "a norm's memory": lambda m: exchanged(m.model.norm.weight, "data", lambda x: x * OTHERS),
    "a buffer": lambda m: written(m.model.rotary_emb.inv_freq),
    "an activation": lambda m: exchanged(first(m).mlp, "act_fn", lambda _: nn.Tanh()),
    "a part twice": lambda m: exchanged(
        m.model.layers[1].mlp, "down_proj", lambda _: first(m).mlp.down_proj
    ),
    "another order": lambda m: swapped(m.model.layers),
    "fewer layers": shortened,
    "the configuration": lambda m: exchanged(m.config, "sliding_window", lambda _: 4),
}
# What becomes of these is Python's to decide, so that all forwards are computed.
COMPUTED = {
    "a class": lambda m: exchanged(m.model.norm, "__class__", lambda _: Mirrored),
    "autocast": lambda m: torch.autocast("cpu", torch.bfloat16),
    "a hook": lambda m: hooked(first(m).mlp.register_forward_hook),
    "a forward": lambda m: exchanged(first(m).mlp, "forward", partial(scaled, by=0.3)),
    "rotary positions": lambda m: exchanged(modeling_llama, "apply_rotary_pos_emb", stretched),
    "an operator": lambda m: exchanged(F, "silu", partial(scaled, by=0.3)),
    "linear layers": lambda m: exchanged(F, "linear", partial(scaled, by=0.8)),
    "attention": lambda m: mock.patch.dict(
        ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=uniform(ALL_ATTENTION_FUNCTIONS["sdpa"])
    ),
    "a class's forward": lambda m: exchanged(LlamaMLP, "forward", partial(scaled, by=0.2)),
    "calls of modules": lambda m: exchanged(nn.Module, "__call__", louder),
    "what the loop asks": lambda m: exchanged(m, "prepare_inputs_for_generation", forgetting),
}
CHANGES = RECORDABLE | COMPUTED
