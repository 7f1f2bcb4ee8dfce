"""Gated MLPs and attention in fewer operations: the bits of their own forward, or that itself."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE, attention_of
from hf_retrieval_assist.kernels import compact, fusions, linear, self_attention
from hf_retrieval_assist.kernels.attention import AttentionTuning
from hf_retrieval_assist.kernels.fused import learn_fusions
from hf_retrieval_assist.kernels.fusions import fuse, fused_of
from hf_retrieval_assist.kernels.linear import linears
from hf_retrieval_assist.kernels.quantized_model import QuantizedWeight
from hf_retrieval_assist.kernels.reroute import reroute, standing_in
from hf_retrieval_assist.kernels.skinny import (
    can_turn,
    kernel_linear,
    linear_together,
    set_chooser,
    turn_heads,
)
from tests.draft_models.test_eagle_lossless import with_lora
from tests.support.lossless import build, equal

WHOLE = (
    LlamaForCausalLM,
    Gemma3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    MistralForCausalLM,
)
IDS = torch.tensor([[5, 17, 3, 42, 8, 11]])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Whatever is fastest here, the kernels serve weights and heads of all sizes."""
    monkeypatch.setattr(AttentionTuning, "takes_kernel", lambda *arguments: True)
    set_chooser(lambda weight: kernel_linear)
    yield
    set_chooser(linear.TUNING.choose, linear.LEAST_ELEMENTS)


@pytest.fixture
def together(monkeypatch):
    """How many products each operation gave; 0 where layers were asked one by one."""
    counted = []

    def count(x, layers, stand_ins):
        products = linear_together(x, layers, stand_ins)
        counted.append(0 if products is None else len(products))
        return products

    monkeypatch.setattr(linear, "linear_together", count)
    return counted


def model_of(model_class, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = build(model_class, head_dim=16, **options).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return model


def learn(model):
    learn_fusions(model, attention_of)
    return model


def unlearn(model):
    for module in model.modules():
        fuse(module, None)


@torch.no_grad()
def conversation(model):
    """Logits of a text in three forwards over one cache, and of two padded rows."""
    cache = DynamicCache(config=model.config)
    parts = [IDS[:, :3], IDS[:, 3:4], IDS[:, 4:]]
    logits = [model(part, **{CACHE: cache}).logits for part in parts]
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    return [*logits, model(IDS.repeat(2, 1), attention_mask=mask).logits]


def agree(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_class", WHOLE)
def test_a_whole_model_gives_the_bits_of_its_own_forward(model_class, dtype, together):
    model = model_of(model_class, dtype)
    with reroute():
        plain = conversation(model)
        learn(model)
        together.clear()
        assert agree(conversation(model), plain)
    # Gate and up, down; queries, keys and values, the output.
    assert sorted(together) == sorted(4 * [2, 1, 3, 1] * model.config.num_hidden_layers)


@pytest.mark.parametrize("model_class", [Phi3ForCausalLM, GPTNeoXForCausalLM, Olmo2ForCausalLM])
def test_modules_of_another_kind_are_left_alone(model_class):
    """Projections in one matrix; another rotation; norms of all heads at once."""
    model = model_of(model_class)
    with reroute():
        plain = conversation(model)
        learn(model)
        assert agree(conversation(model), plain)
    kinds = {type(fused_of(module)) for module in model.modules()}
    assert self_attention._Attention not in kinds


def test_every_row_gives_the_same_bits_whatever_stands_beside_it():
    model = learn(model_of(Gemma3ForCausalLM, torch.bfloat16))

    def behind_a_prefix(n):
        cache = DynamicCache(config=model.config)
        model(IDS[:, :2], **{CACHE: cache})
        return model(IDS[:, 2 : 2 + n], **{CACHE: cache}).logits

    with torch.no_grad(), reroute():
        whole = behind_a_prefix(4)
        for n in range(1, 4):
            assert torch.equal(behind_a_prefix(n), whole[:, :n])


@pytest.mark.parametrize("kind", ["eight bits", "as bfloat16", "one of three in eight bits"])
def test_what_stands_for_weights_is_read(kind, together):
    model = model_of(Qwen2ForCausalLM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    weights = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    if kind == "as bfloat16":
        others = {id(weight): compact.stand_in(weight) for weight in weights}
    else:
        chosen = weights if kind == "eight bits" else weights[1::7]
        others = {id(weight): QuantizedWeight.pack(weight) for weight in chosen}
    with standing_in(others):
        plain = conversation(model)
        learn(model)
        together.clear()
        assert agree(conversation(model), plain)
    assert (0 in together) == (kind == "one of three in eight bits")


def test_weights_that_another_method_serves_are_multiplied_by_it(together):
    set_chooser(lambda weight: linear.METHODS["pytorch"])
    model = model_of(LlamaForCausalLM)
    with reroute():
        plain = conversation(model)
        learn(model)
        assert agree(conversation(model), plain)
    assert set(together) == {0}
    assert fused_of(model.model.layers[0].self_attn) is not None


def test_assisted_texts_are_those_of_plain_generate(together):
    equal(model_of(LlamaForCausalLM))
    equal(model_of(Gemma3ForCausalLM), do_sample=True)
    assert 3 in together


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "q_norm", "gate_proj", "down_proj", "act_fn"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_parts_run(name, before):
    model = learn(model_of(Qwen3ForCausalLM))
    with reroute():
        plain = conversation(model)
    seen = []
    for part_name, module in model.named_modules():
        if part_name.endswith(name):
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            register(lambda *arguments: seen.append(1))
    with reroute():
        assert agree(conversation(model), plain)
    assert len(seen) == 4 * model.config.num_hidden_layers


def test_hooks_of_all_modules_run():
    model = learn(model_of(LlamaForCausalLM))
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.append(type(module))
    )
    try:
        with torch.no_grad(), reroute():
            model(IDS)
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 7 * model.config.num_hidden_layers + 1


def test_adapters_that_come_later_are_computed(together):
    model = learn(model_of(LlamaForCausalLM))
    wrapped = with_lora(model)
    with reroute():
        fused = conversation(wrapped)
        unlearn(wrapped)
        assert agree(conversation(wrapped), fused)
    assert not torch.equal(fused[0], conversation(model_of(LlamaForCausalLM))[0])


def test_weights_that_change_are_followed():
    model = learn(model_of(Qwen2ForCausalLM))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.25
        with reroute():
            fused = conversation(model)
            unlearn(model)
            assert agree(conversation(model), fused)


def test_gradients_are_those_of_the_modules_own_operators():
    model = learn(model_of(Qwen3ForCausalLM))
    with reroute():
        model(IDS, labels=IDS).loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    assert agree(found, [parameter.grad for parameter in model.parameters()])


def test_modes_that_change_operators_see_them(together):
    model = learn(model_of(LlamaForCausalLM))
    with torch.no_grad(), reroute(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model(IDS).logits
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(IDS).logits, inside)
    assert set(together) == {0}


def test_compiled_models_are_served_as_they_are(together):
    model = learn(model_of(LlamaForCausalLM))
    compiled = torch.compile(model, backend="eager")
    together.clear()
    with torch.no_grad(), reroute():
        inside = compiled(IDS).logits
    with torch.no_grad():
        assert torch.equal(compiled(IDS).logits, inside)
    assert not together


def test_attention_in_training_keeps_its_dropout():
    model = learn(model_of(LlamaForCausalLM, attention_dropout=0.5)).train()
    with torch.no_grad(), reroute():
        torch.manual_seed(0)
        inside = model(IDS).logits
    with torch.no_grad():
        torch.manual_seed(0)
        assert torch.allclose(model(IDS).logits, inside, atol=1e-5)


def test_another_attention_is_asked(monkeypatch):
    model = learn(model_of(LlamaForCausalLM))
    model.set_attn_implementation("eager")
    with torch.no_grad(), reroute():
        found = model(IDS, output_attentions=True)
    assert found.attentions[0] is not None


def test_other_threads_and_code_outside_are_unaffected(together):
    model = learn(model_of(LlamaForCausalLM))
    plain = modeling_llama.LlamaMLP.__dict__["forward"]
    with reroute():
        together.clear()
        thread = threading.Thread(target=conversation, args=(model,))
        thread.start()
        thread.join()
        assert not together
        assert modeling_llama.LlamaMLP.forward is not plain
    conversation(model)
    assert not together
    assert modeling_llama.LlamaMLP.forward is plain


def test_a_forward_that_was_replaced_stays(monkeypatch, together):
    model = learn(model_of(LlamaForCausalLM))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    together.clear()
    with reroute():
        conversation(model)
    assert set(together) == {3, 1}


class Doubled(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 2


class Clipped(modeling_llama.LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.5) * self.up_proj(x))


@pytest.mark.parametrize("kind", [Doubled, Clipped])
def test_other_gated_mlps_are_left_alone(kind):
    config = model_of(LlamaForCausalLM).config
    module = learn(kind(config))
    learn(modeling_llama.LlamaMLP(config))
    x = torch.randn(1, 3, config.hidden_size)
    with torch.no_grad(), reroute():
        found = module(x)
    assert fused_of(module) is None
    with torch.no_grad():
        assert torch.allclose(found, module(x), atol=1e-6)


def test_what_is_known_goes_with_the_model():
    model = learn(model_of(LlamaForCausalLM))
    modules = list(model.modules())
    assert sum(module in fusions._fused for module in modules) == 4 * len(model.model.layers) + 1
    unlearn(model)
    assert not any(module in fusions._fused for module in modules)


def test_assistants_learn_models():
    model = model_of(LlamaForCausalLM)
    model.generate(IDS, assistant=SamAssistant(), max_new_tokens=2, do_sample=False)
    assert fused_of(model.model.layers[0].mlp) is not None
    assert fused_of(model.model.layers[0].self_attn) is not None


def test_layers_that_cannot_be_multiplied_together():
    layers = [nn.Linear(8, 4), nn.Linear(8, 6, bias=False)]
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = [kernel_linear(x, layer.weight, layer.bias) for layer in layers]
        assert linear_together(x, layers, {}) is None  # outside of a scope
        with reroute():
            assert agree(linears(x, *layers), expected)
            assert agree(linear_together(x, layers, {}), expected)
            refused = [
                (x.double(), layers),
                (x.new_empty(0, 8), layers),
                (torch.randn(2, 7), layers),
                (torch.randn(66, 8), layers),
                (x, [*layers, nn.Linear(8, 3).bfloat16()]),
                (x, [nn.Linear(8, 3)] * 5),
                (x, [nn.Identity()]),
            ]
            for rows, others in refused:
                assert linear_together(rows, others, {}) is None
    with reroute():
        assert linear_together(x, layers, {}) is None  # autograd records it


def test_heads_that_cannot_be_turned():
    x, table = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    with torch.no_grad():
        assert can_turn(x, table, table[:1], 4, ((), ()))
        for rows, cosines, depth, norms in (
            (x, table, 3, ()),
            (x, table, 8, ()),
            (x, table[:, :2], 4, ()),
            (x.bfloat16(), table, 4, ()),
            (x[0], table, 4, ()),
            (x, table, 4, ((torch.ones(5), 1e-6, False, False, 8),)),
        ):
            assert not can_turn(rows, cosines, table, depth, norms)
        assert turn_heads([torch.randn(2, 3, 6)], table, table, 4, ()) is None
    assert not can_turn(x, table, table, 4, ())  # autograd is on


def test_probes_of_modules_that_take_nothing_of_the_kind():
    """Whatever a module raises, it is left alone."""
    model = model_of(LlamaForCausalLM)
    attention = model.model.layers[0].self_attn
    attention.config = SimpleNamespace(_attn_implementation="no such")
    learn(attention)
    assert fused_of(attention) is None
