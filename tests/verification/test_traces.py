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
from hf_retrieval_assist.verification.traces import REMEMBERS
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


class Batched(nn.BatchNorm1d):
    """A norm over all elements of a token."""

    def forward(self, x):
        return super().forward(x.view(-1, 1, WIDTH)).view_as(x)


def with_batch_norm(part_in_train_mode):
    """Whose statistics are read in another part than that in which they are written."""
    model = build()
    layer = model.model.layers[0]
    written = Batched(1).train(part_in_train_mode)
    layer.mlp = nn.Sequential(written, layer.mlp)
    reads = lambda own, x: x - own.held[0].running_mean  # noqa: E731
    model.model.layers[1].mlp = Part(model.model.layers[1].mlp, reads, held=[written]).eval()
    return model


REMEMBERING |= {
    "max_norm": partial(with_max_norm, True),
    "an observer": with_observer,
    "spectral norm": partial(with_norm_of_weights, nn.utils.parametrizations.spectral_norm),
    "batch norm": partial(with_batch_norm, True),
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
    "batch norm in use": partial(with_batch_norm, False),
}


@pytest.mark.parametrize("kind", BENIGN)
def test_models_that_count_or_make_the_same_anew_are_assisted(kind, tests):
    same(BENIGN[kind](), calls=12, tier="tree")
    assert len(tests) <= 2


def kept(model):
    """Tensors and plain attributes of all modules, by value."""
    tensors = {n: x.clone() for n, x in [*model.named_parameters(), *model.named_buffers()]}
    plain = {
        (name, key): str(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | list) and key != "_forward_hooks"
    }
    return tensors, plain


@pytest.mark.parametrize("kind", REMEMBERING | BENIGN)
def test_the_test_leaves_nothing_behind(kind):
    model = (REMEMBERING | BENIGN)[kind]()
    logs = [x for m in model.modules() for x in vars(m).values() if isinstance(x, list)]
    names = [set(vars(module)) for module in model.modules()]
    tensors, plain = kept(model)
    verdict(model)
    now, others = kept(model)
    assert all(torch.equal(tensors[name], now[name]) for name in tensors)
    assert others == plain
    assert [set(vars(module)) for module in model.modules()] == names
    after = [x for m in model.modules() for x in vars(m).values() if isinstance(x, list)]
    assert all(one is other for one, other in zip(logs, after, strict=True))


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


def seeded(model, **options):
    random.seed(0)
    np.random.seed(0)
    return run(model, **options)


@pytest.mark.parametrize("kind", DRAWING)
def test_models_that_draw_are_plain_under_each_seed(kind):
    model = DRAWING[kind]()
    plain = seeded(model)
    for _ in range(2):
        assistant = knowing(plain)
        assert torch.equal(seeded(model, assistant=assistant), plain)
        assert assistant.stats.last.tier == "plain"


@pytest.mark.parametrize("kind", DRAWING)
def test_the_test_draws_nothing(kind):
    model = DRAWING[kind]()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert verdict(model).tier is Tier.PLAIN
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]


@pytest.mark.parametrize(
    ("forward", "make"),
    [
        (
            lambda own, x: x + torch.rand(x.shape, generator=own.generator),
            lambda: torch.Generator().manual_seed(0),
        ),
        (lambda own, x: x * float(own.generator.random()), lambda: np.random.default_rng(0)),
        (lambda own, x: x * float(own.generator.rand()), lambda: np.random.RandomState(0)),
        (lambda own, x: x * own.generator.random(), lambda: random.Random(0)),
    ],
    ids=["PyTorch's", "NumPy's", "NumPy's older", "Python's"],
)
def test_numbers_of_a_models_own(forward, make):
    def fresh():
        model = build()
        layer = model.model.layers[0]
        layer.mlp = Part(layer.mlp, forward, generator=make()).eval()
        return model

    same(fresh(), plain=run(fresh()), tier="plain")


def test_a_model_that_is_told_to_observe_later():
    model = with_observer()
    model.apply(quantization.disable_observer)
    assert verdict(model).tier is not Tier.PLAIN
    model.apply(quantization.enable_observer)
    assert verdict(model).reason == REMEMBERS


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
