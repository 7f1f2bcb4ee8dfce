"""Calls that plain decoding compiles, callers' static caches, and models compiled in place."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, CompileConfig, MixtralForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE, compilations
from tests.support.lossless import INPUTS, PROMPT, build, equal, knowing, run, same, static
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases


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
    assert {key.cost_variant for key in assistant.costs._models} == {""}


WAYS = {
    "CPU": {"cache_implementation": "static", "compile_config": CompileConfig()},
    "dynamic": static(cache_implementation=None),
    "disabled": static(disable_compile=True),
}


@pytest.mark.parametrize("way", cases(WAYS, 2))
def test_every_way_to_ask_for_it_or_not(way):
    same(build(), tier="tree", **WAYS[way])


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


def compile_attention(model, _):
    AttentionInterface.register("compiled", whole(sdpa_attention_forward))
    model.set_attn_implementation("compiled")


def compile_part(model, _):
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)


def script_norm(script):
    """A change of a model, whose last norm becomes what `script` makes of one."""
    return lambda model, _: setattr(model.model, "norm", script(nn.RMSNorm(64, 1e-6)))


# What its caller compiled, and what is said of it.
COMPILED = {
    "layers": lambda model, _: [layer.compile(backend="eager") for layer in model.model.layers],
    "model": lambda model, _: model.compile(backend="eager", fullgraph=True),
    "forward": lambda model, _: setattr(model, "forward", whole(model.forward)),
    "body": lambda model, _: setattr(model, "model", torch.compile(model.model, backend="eager")),
    "a function of the modeling module": compile_in_module,
    "in a part": compile_part,
    "attention": compile_attention,
    "a hook": lambda model, _: model.model.norm.register_forward_hook(whole(lambda *x: x[2] * 2)),
}
SCRIPTED = {
    "scripted": script_norm(torch.jit.script),
    "within": script_norm(lambda norm: nn.Sequential(torch.jit.script(norm))),
    "traced": script_norm(lambda norm: torch.jit.trace(norm, torch.randn(1, 3, 64))),
}


@pytest.mark.parametrize("kind", cases(COMPILED | SCRIPTED, ["layers", "in a part", "scripted"]))
def test_what_callers_compiled_is_decoded_plainly_and_left_as_it_is(kind, monkeypatch):
    """PyTorch never compiles a function that was met under a mode, and plain decoding would raise
    from then on."""
    model = build(num_hidden_layers=1)
    same(model, tier="tree")
    (COMPILED | SCRIPTED)[kind](model, monkeypatch)
    plain, before = run(model), compilations()
    _, _, assistant = same(model, plain=plain, tier="plain")
    assert compilations() == before
    said = "TorchScript" if kind in SCRIPTED else "compiled"
    assert said in assistant.stats.last.reason
    if kind not in ("layers", "model", "forward", "body"):  # whole modules take seconds each time
        torch._dynamo.reset()
        with SamAssistant().attached(model):
            assert torch.equal(run(model), plain)


def test_a_compiled_wrapper_generates_as_its_model():
    model = torch.compile(build(), backend="eager")
    equal(model, tier="tree")


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
