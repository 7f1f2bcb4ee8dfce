"""What forwards leave behind: models that draw, remember or write, and tests that leave nothing."""

import copy
import random
import threading
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.verification import traces
from hf_retrieval_assist.verification.service import ServiceDemand, choose_service
from hf_retrieval_assist.verification.tiers import Tier
from tests.support.lossless import PROMPT, build, knowing, run, same

WIDTH = 64


def verdict(model):
    """What is found out about a model on its owner's word."""
    return choose_service(model, {}, demand=ServiceDemand(trusts=True))


class Part(nn.Module):
    """A part of a model that keeps things beside its forward, which is given this module and x;
    of what is held tensors become buffers."""

    def __init__(self, part, forward, **held):
        super().__init__()
        self.part, self.does = part, forward
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.part(self.does(self, x))


def with_part(forward, **held):
    model = build()
    for layer in model.model.layers[:2]:
        layer.mlp = Part(layer.mlp, forward, **copy.deepcopy(held)).eval()
    return model


def mix(mean, x):
    """Move a mean towards that of x, in place."""
    return mean.lerp_(x.mean((0, 1)), 0.3)


def mean_as_number(own, x):
    own.number = 0.7 * own.number + 0.3 * float(x.mean())
    return x - own.number


def mean_replaced(own, x):
    own.mean = torch.lerp(own.mean, x.mean((0, 1)), 0.3)
    return x - own.mean


def mean_in_list(own, x):
    own.held[0] = torch.lerp(own.held[0], x.mean((0, 1)), 0.3)
    return x - own.held[0]


def mean_through_numpy(own, x):
    torch.from_numpy(own.array).copy_(mix(own.mean, x))
    return x - torch.from_numpy(own.array)


def every_third(own, x):
    own.calls += 1
    return x * 2 if int(own.calls) % 3 == 0 else x


ZEROS = torch.zeros(WIDTH)
REMEMBERING = {
    "a mean in place": partial(with_part, lambda own, x: x - mix(own.mean, x), mean=ZEROS),
    "a mean written past autograd": partial(
        with_part, lambda own, x: x - mix(own.mean.data, x), mean=ZEROS
    ),
    "a mean in another tensor": partial(with_part, mean_replaced, mean=ZEROS),
    "a mean in a list": partial(with_part, mean_in_list, held=[ZEROS]),
    "a mean through NumPy": partial(
        with_part, mean_through_numpy, mean=ZEROS, array=np.zeros(WIDTH, np.float32)
    ),
    "a mean as a number": partial(with_part, mean_as_number, number=0.0),
    "every third call": partial(with_part, every_third, calls=torch.zeros((), dtype=torch.long)),
}


def with_max_norm(tied):
    model = build(tie_word_embeddings=tied)
    model.get_input_embeddings().max_norm = 1.0
    return model


def with_observer():
    model = build(hidden_size=32, head_dim=8)
    for layer in model.model.layers:
        fake = quantization.FakeQuantize(quantization.MinMaxObserver, quant_min=0, quant_max=15)
        layer.mlp.down_proj = nn.Sequential(fake, layer.mlp.down_proj)
    run(model)
    return model


def with_norm_of_weights(wrap):
    model = build()
    for layer in model.model.layers:
        wrap(layer.mlp.down_proj)
    return model.train()


REMEMBERING |= {
    "max_norm": partial(with_max_norm, True),
    "an observer": with_observer,
    "spectral norm": partial(with_norm_of_weights, nn.utils.parametrizations.spectral_norm),
}


@pytest.mark.parametrize("kind", REMEMBERING)
def test_models_whose_forwards_remember_are_plain(kind):
    """They are so from the first call on, which tests the model: calls begin in one state."""
    model = REMEMBERING[kind]()
    before = copy.deepcopy(model)
    plain = run(copy.deepcopy(before))
    same(model, plain=plain, tier="plain")
    again = copy.deepcopy(before)
    assert "later forwards" in verdict(again).reason
    assert torch.equal(run(again), plain)


def counter(own, x):
    own.calls += 1
    return x


def usage(own, x):
    own.usage[x.argmax(-1).flatten()] += 1
    return x


def grown(own, x):
    own.log.append(x.shape)
    own.table.setdefault("shapes", []).append(x.shape[1])
    return x


def cached(own, x):
    own.frequencies = torch.arange(WIDTH) / WIDTH
    return x + own.frequencies


BENIGN = {
    "a counter": partial(with_part, counter, calls=0),
    "usage of experts": partial(with_part, usage, usage=torch.zeros(WIDTH)),
    "lists that grow": partial(with_part, grown, log=[], table={}),
    "what is made anew": partial(with_part, cached, frequencies=ZEROS),
    "spectral norm in use": lambda: with_norm_of_weights(nn.utils.spectral_norm).eval(),
    "train mode": lambda: build().train(),
}


def kept(model):
    """Attributes, parameters and buffers of all modules by value; lists are themselves."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    owned = [vars(module) for module in model.modules()]
    lists = [(value, list(value)) for own in owned for value in own.values() if type(value) is list]
    numbers = [(key, x) for own in owned for key, x in own.items() if type(x) in (bool, int, float)]
    names = [own.keys() - {"_forward_hooks"} for own in owned]
    return [(name, x.clone()) for name, x in tensors], lists, numbers, names


@pytest.mark.parametrize("kind", BENIGN)
def test_models_that_count_or_make_the_same_anew_are_assisted(kind, tests):
    """And their test leaves nothing behind."""
    model = BENIGN[kind]()
    tensors, lists, *others = kept(model)
    verdict(model)
    now, held, *after = kept(model)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(tensors, now, strict=True))
    assert all(x is y for (x, _), (y, _) in zip(lists, held, strict=True))
    assert [content for _, content in lists] == [content for _, content in held]
    assert others == after
    same(model, calls=12, tier="tree")
    assert len(tests) <= 2


def with_train_part(part):
    model = build()
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, part.train())
    return model


def with_attention_in_train_mode():
    model = build(attention_dropout=0.2)
    model.model.layers[1].self_attn.train()
    return model


numpy_noise = partial(with_part, lambda own, x: x + float(np.random.rand()))
DRAWING = {
    "noise": partial(with_part, lambda own, x: x + 0.1 * torch.randn_like(x)),
    "noise now and then": partial(
        with_part, lambda own, x: x + torch.randn_like(x) if random.random() < 0.01 else x
    ),
    "NumPy's": numpy_noise,
    "dropout": partial(with_train_part, nn.Dropout(0.1)),
    "attention": with_attention_in_train_mode,
    "a function": partial(
        with_part, lambda own, x: nn.functional.dropout(x, 0.1, own.dropping), dropping=True
    ),
}


def with_generator(make, forward):
    def made():
        model = build()
        layer = model.model.layers[0]
        layer.mlp = Part(layer.mlp, forward, generator=make()).eval()
        return model

    return made


DRAWING |= {
    "PyTorch's own": with_generator(
        lambda: torch.Generator().manual_seed(0),
        lambda own, x: x + torch.rand(x.shape, generator=own.generator),
    ),
    "NumPy's own": with_generator(
        lambda: np.random.default_rng(0), lambda own, x: x * float(own.generator.random())
    ),
    "NumPy's older own": with_generator(
        lambda: np.random.RandomState(0), lambda own, x: x * float(own.generator.rand())
    ),
    "Python's own": with_generator(
        lambda: random.Random(0), lambda own, x: x * own.generator.random()
    ),
}


def seeded(model, **options):
    random.seed(0)
    np.random.seed(0)
    return run(model, **options)


@pytest.mark.parametrize("kind", DRAWING)
def test_models_that_draw_are_plain_under_each_seed(kind):
    """And their test draws nothing."""
    plain, model = seeded(DRAWING[kind]()), DRAWING[kind]()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert verdict(model).tier is Tier.PLAIN
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]
    assistant = knowing(plain)
    assert torch.equal(seeded(model, assistant=assistant), plain)
    assert assistant.stats.last.tier == "plain"


def test_a_model_that_was_made_in_inference_mode():
    with torch.inference_mode():
        model = build()
        plain = run(model)
    for inside in (False, True, False):
        with torch.inference_mode(inside):
            _, _, assistant = same(model, PROMPT.clone(), plain=plain, tier="tree")
            assert assistant.stats.last.accepted > 0


@contextmanager
def another_drawing(draw):
    """Scope in which another thread draws all the time."""
    done = threading.Event()

    def go_on():
        while not done.wait(0.001):
            draw()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, partial(torch.rand, 1)],
    ids=["Python", "NumPy", "torch"],
)
def test_numbers_that_another_thread_draws_all_the_time(draw):
    """A library's model does not draw them; of a caller's own nobody knows until that thread is
    done, and then it is asked again."""
    model, strange = build(), with_part(lambda own, x: x * 0.9)
    with another_drawing(draw):
        assert verdict(model).tier is Tier.TREE
        assert verdict(strange).reason == traces.MAY_DRAW
    SamAssistant.model_changed()
    assert verdict(strange).tier is Tier.TREE
    assert verdict(numpy_noise()).reason == traces.DRAWS
