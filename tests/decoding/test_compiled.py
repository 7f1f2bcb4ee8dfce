"""Calls that plain decoding compiles, callers' static caches, and models compiled in place."""

import io
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, CompileConfig, MixtralForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from hf_retrieval_assist import SamAssistant, attach
from hf_retrieval_assist.host.transformers_private import CACHE, compilations
from tests.support.lossless import INPUTS, PROMPT, build, equal, knowing, run, same, static
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases

ROOM = 96


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "inputs", "options"),
    [
        ("LlamaForCausalLM", "padded", {}),
        ("Gemma3ForCausalLM", "one row", {}),
        ("LlamaForCausalLM", "one row", {"do_sample": True, "top_k": 8, "repetition_penalty": 1.3}),
        ("Qwen3ForCausalLM", "padded", {}),
    ],
)
def test_static_calls_draft_by_the_models_own_forward(model_class, inputs, options):
    """Drafts and plain decoding are told apart by their time; only the latter is compiled."""
    model = build(model_class)
    options = static(**({"do_sample": False} | options), max_new_tokens=60)
    before = compilations()
    torch.manual_seed(4)
    model.generate(**INPUTS[inputs], **options)
    compiled = compilations()
    assert compiled > before
    _, _, assistant = agreeing(model, INPUTS[inputs], tier="tree", seed=4, **options)
    assert compilations() == compiled
    assert {key.cost_variant for key in assistant.costs.timed()} == {""}


@pytest.mark.slow
def test_settings_of_the_model_ask_for_it_too():
    model = build(num_hidden_layers=1)
    for name, value in static().items():
        setattr(model.generation_config, name, value)
    before = compilations()
    same(model)
    assert compilations() == before + 1


WAYS = {
    "CPU": {"cache_implementation": "static", "compile_config": CompileConfig()},
    "dynamic": static(cache_implementation=None),
    "disabled": static(disable_compile=True),
}


@pytest.mark.parametrize("way", cases(WAYS, 2))
def test_every_way_to_ask_for_it_or_not(way):
    same(build(), tier="tree", **WAYS[way])


@pytest.mark.slow
def test_inference_mode_in_one_call_and_not_in_the_next():
    model = build(num_hidden_layers=1)
    options = static(max_new_tokens=8)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            same(model, **options)


COMPILED = {
    "model": lambda model: model.compile(backend="eager", fullgraph=True),
    "forward": lambda model: setattr(
        model, "forward", torch.compile(model.forward, backend="eager", fullgraph=True)
    ),
    "body": lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")),
    "layers": lambda model: [layer.compile(backend="eager") for layer in model.model.layers],
}


@pytest.mark.parametrize("part", cases(COMPILED, ["layers"]))
def test_models_that_their_callers_compiled_in_place_are_decoded_plainly(part, told):
    model = build(num_hidden_layers=1)
    same(model, tier="tree")
    COMPILED[part](model)
    run(model)
    before = compilations()
    same(model, tier="plain")
    assert compilations() == before
    assert any("its caller has compiled" in text for text in told.messages)


whole = partial(torch.compile, backend="eager", fullgraph=True)


def compile_in_module(model, monkeypatch):
    function = whole(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)


class Scaled(nn.Module):
    """A part that is its caller's own, with a compiled function among its attributes."""

    def __init__(self, part):
        super().__init__()
        self.part, self.scale = part, whole(lambda x: x * 0.5)

    def forward(self, x):
        return self.scale(self.part(x))


class Decorated(nn.Linear):
    """A part whose class has compiled its forward."""

    @whole
    def forward(self, x):
        return super().forward(x) * 0.5


def compile_attention(model, _):
    AttentionInterface.register("compiled", whole(sdpa_attention_forward))
    model.set_attn_implementation("compiled")


def compile_part(model, _):
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)


def compile_output_layer(model, _):
    model.lm_head = Decorated(model.lm_head.in_features, model.lm_head.out_features, bias=False)


COMPILED_FUNCTIONS = {
    "a function of the modeling module": compile_in_module,
    "in a part": compile_part,
    "the output layer": compile_output_layer,
    "attention": compile_attention,
    "a hook": lambda model, _: model.model.norm.register_forward_hook(whole(lambda *x: x[2] * 2)),
}


@pytest.mark.parametrize("kind", COMPILED_FUNCTIONS)
def test_functions_that_their_callers_compiled_whole_are_left_as_they_are(kind, monkeypatch):
    """PyTorch never compiles a function that was met under a mode, and plain decoding would raise
    from then on."""
    model = build(num_hidden_layers=1)
    COMPILED_FUNCTIONS[kind](model, monkeypatch)
    plain = run(model)
    for _ in range(2):
        same(model, plain=plain, tier="plain")
    torch._dynamo.reset()
    assert torch.equal(run(model), plain)


def scripted(norm):
    return torch.jit.script(nn.RMSNorm(norm.weight.shape, 1e-6))


def saved_and_loaded(norm):
    stored = io.BytesIO()
    torch.jit.save(scripted(norm), stored)
    stored.seek(0)
    return torch.jit.load(stored)


SCRIPTED = {
    "scripted": scripted,
    "frozen": lambda norm: torch.jit.freeze(scripted(norm).eval()),
    "loaded": saved_and_loaded,
    "traced": lambda norm: torch.jit.trace(norm, torch.randn(1, 3, 32), check_trace=False),
    "within": lambda norm: nn.Sequential(scripted(norm)),
}


@pytest.mark.parametrize("kind", SCRIPTED)
@pytest.mark.parametrize("attached", [False, True])
def test_models_with_parts_in_torchscript_are_decoded_plainly(kind, attached):
    model = build(num_hidden_layers=1)
    model.model.norm = SCRIPTED[kind](model.model.norm)
    plain, assistant = run(model), SamAssistant()
    if attached:
        attach(model, assistant)
        assert torch.equal(run(model), plain)
    else:
        assert torch.equal(run(model, assistant=assistant), plain)
    assert "TorchScript" in assistant.stats.last.reason


def test_an_encoder_decoder_with_a_part_in_torchscript():
    model = build("T5ForConditionalGeneration")
    model.decoder.final_layer_norm = SCRIPTED["traced"](model.decoder.final_layer_norm)
    same(model, tier="plain")


def test_a_compiled_wrapper_generates_as_its_model():
    model = torch.compile(build(), backend="eager")
    equal(model, tier="tree")


def test_conversations_on_a_callers_static_cache():
    model, options = build(num_hidden_layers=1), static(max_new_tokens=14)
    del options["cache_implementation"]
    before, cache = compilations(), StaticCache(config=model.config, max_cache_len=ROOM)
    kinds, text = [type(layer) for layer in cache.layers], PROMPT
    for turn, assisted in enumerate((True, False, True)):
        plain = run(model, text, **options)
        assistant = knowing(plain) if assisted else None
        found = run(model, text, **{CACHE: cache}, **options, assistant=assistant)
        assert torch.equal(plain, found)
        assert int(cache.get_seq_length()) == found.shape[1] - 1
        # The caller adds tokens in each turn.
        text = torch.cat([found, PROMPT[:, : 3 + turn]], dim=1)
    assert compilations() > before
    assert [type(layer) for layer in cache.layers] == kinds


@pytest.mark.parametrize("beyond", cases([0, 1, -1, 7], 2))
def test_a_static_cache_that_is_too_small(beyond):
    model = build()
    plain = run(model)
    room = plain.shape[1] - 1 - beyond
    caches = [StaticCache(config=model.config, max_cache_len=room) for _ in range(2)]
    if beyond <= 0:
        assert torch.equal(plain, run(model, **{CACHE: caches[0]}, assistant=knowing(plain)))
        return
    with pytest.raises(IndexError):
        run(model, **{CACHE: caches[0]})
    with pytest.raises(IndexError, match=f"{CACHE}: expected room.*max_cache_len={room}"):
        run(model, **{CACHE: caches[1]}, assistant=knowing(plain))
    # What fitted in is there to go on from.
    prefix = plain[:, : int(caches[1].get_seq_length()) + 1]
    assert prefix.shape[1] > PROMPT.shape[1]
    more = {"max_new_tokens": 1}
    if prefix.shape[1] <= room:
        assert torch.equal(
            run(model, prefix, **more), run(model, prefix, **{CACHE: caches[1]}, **more)
        )


def test_windows_shorter_than_the_models_are_decoded_plainly():
    model = build("Gemma3ForCausalLM", layer_types=["sliding_attention"] * 2, num_hidden_layers=2)
    window = model.config.sliding_window
    for room, tier in [(window - 2, "plain"), (window, "tree")]:
        first, second = (StaticCache(config=model.config, max_cache_len=room) for _ in range(2))
        plain = run(model, **{CACHE: first})
        assistant = knowing(plain)
        assert torch.equal(plain, run(model, **{CACHE: second}, assistant=assistant))
        assert assistant.stats.last.tier == tier


def test_experts_are_computed_as_plain_decoding_does_where_few_tokens_are_fed(monkeypatch):
    model = build("MixtralForCausalLM")
    inside, seen = [], []

    @contextmanager
    def scope(model):
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(MixtralForCausalLM, "_optimize_model_for_decode", scope)
    plain = run(model)

    def look(module, arguments, output):
        seen.append((arguments[0].shape[1], bool(inside)))

    model.get_input_embeddings().register_forward_hook(look)
    # The self-test, which plain decoding has not, comes first.
    run(model, assistant=knowing(plain))
    seen.clear()
    run(model)
    assert [alike for _, alike in seen] == [False] + [True] * (len(seen) - 1)
    seen.clear()
    for assistant in (knowing(plain), SamAssistant(budget=1)):
        assert torch.equal(plain, run(model, assistant=assistant))
    # More than a few tokens would copy their experts' weights one by one; prompts are no steps.
    assert all(alike == (width <= 2) for width, alike in seen)
    assert {alike for _, alike in seen} == {False, True}
    assert not inside
