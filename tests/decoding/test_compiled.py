"""Calls whose forwards `torch.compile` makes, and callers' static caches."""

from contextlib import contextmanager

import pytest
import torch
from transformers import (
    CompileConfig,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
    StaticCache,
)

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.fixed_verifier import COMPILED_WIDTHS, WIDTHS, FixedVerifier
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.support import op_recorder
from tests.support.lossless import PROMPT, build, knowing, run
from tests.support.oracle_drafter import both, oracle_assistant

BATCH = torch.cat([PROMPT, PROMPT.flip(1), PROMPT + 3])
MASK = torch.ones_like(BATCH)
MASK[1, :5] = MASK[2, :9] = 0
INPUTS = {
    "one row": {"input_ids": PROMPT},
    "padded": {"input_ids": BATCH * MASK, "attention_mask": MASK},
}
ROOM = 96
RARER = [
    (LlamaForCausalLM, "one row"),
    (Gemma3ForCausalLM, "padded"),
    (Qwen3ForCausalLM, "padded"),
]


@pytest.fixture
def compiler():
    with op_recorder.compiler() as compiler:
        yield compiler


def static(compiler, **options):
    """What a caller asks for to have forwards compiled, on a CPU as well."""
    config = CompileConfig(backend=compiler, mode=None, fullgraph=True)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, **options}


@pytest.fixture
def widths(monkeypatch):
    """How many tokens per row were fed by every forward of a call in fixed memory."""
    seen = []
    compute = FixedVerifier._compute

    def noted(verifier, step):
        # The self-test, which nothing is compiled for, has no hidden states to show.
        if verifier.options.taps is not None:
            seen.append(step.inputs.device["token_ids"].shape[1])
        return compute(verifier, step)

    monkeypatch.setattr(FixedVerifier, "_compute", noted)
    return seen


@pytest.mark.parametrize(
    ("model_class", "inputs"),
    [
        (LlamaForCausalLM, "padded"),
        (Gemma3ForCausalLM, "one row"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in RARER),
    ],
)
def test_static_calls_compile_few_graphs_for_all_widths(model_class, inputs, compiler, widths):
    model = build(model_class)
    options = static(compiler, do_sample=False, max_new_tokens=100)
    plain = model.generate(**INPUTS[inputs], **options)
    of_plain, steps = compiler.graphs, []
    for seed in range(3):
        assistant = oracle_assistant(
            plain, INPUTS[inputs].get("attention_mask"), seed=seed, depth=2
        )
        assert torch.equal(plain, model.generate(**INPUTS[inputs], **options, assistant=assistant))
        assert assistant.stats.tier == "tree"
        assert assistant.stats.last.accepted > 0
        steps.append(assistant.stats.last.steps)
        # One for a single token, one for the first other width, one for all others.
        assert 1 <= compiler.graphs - of_plain <= 3
    assert max(steps) >= 50
    assert {4, 8, 16} <= set(widths) <= set(WIDTHS)


def test_widths_that_are_compiled_apart(compiler, widths):
    model = build(LlamaForCausalLM)
    options = static(compiler, do_sample=False, max_new_tokens=60)
    options["compile_config"].dynamic = False
    both(model, INPUTS["one row"], oracle={"depth": 3}, **options)
    assert len(set(widths)) >= 3
    assert set(widths) <= set(COMPILED_WIDTHS)
    assert compiler.graphs == 1 + len(set(widths))


def test_trees_are_cut_to_the_widest_that_is_compiled(compiler, widths, monkeypatch):
    monkeypatch.setattr("hf_retrieval_assist.verification.fixed_verifier.WIDTHS", (1, 4))
    model = build(LlamaForCausalLM)
    options = static(compiler, do_sample=False, max_new_tokens=40)
    plain, assisted, assistant = both(model, INPUTS["padded"], **options)
    assert torch.equal(plain, assisted)
    assert assistant.stats.last.accepted > 0
    assert set(widths) == {1, 4}


def test_settings_of_the_model_ask_for_it_too(compiler, widths):
    model = build(LlamaForCausalLM)
    for name, value in static(compiler).items():
        setattr(model.generation_config, name, value)
    plain = run(model)
    assert compiler.graphs == 1
    assert torch.equal(plain, run(model, assistant=knowing(plain)))
    assert widths


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "compile_config": CompileConfig()},
        {"compile_config": "as a caller", "cache_implementation": None},
        {"compile_config": "as a caller", "disable_compile": True},
    ],
    ids=["CPU", "CPU, options", "dynamic", "disabled"],
)
def test_nothing_is_compiled_where_plain_decoding_is_not(options, compiler, widths):
    model = build(LlamaForCausalLM)
    if options.get("compile_config") == "as a caller":
        options = (
            static(compiler) | options | {"compile_config": static(compiler)["compile_config"]}
        )
    plain = run(model, **options)
    assert torch.equal(plain, run(model, assistant=knowing(plain), **options))
    assert compiler.graphs == 0
    assert not widths


def test_sampled_tokens_under_the_same_seed(compiler):
    model = build(LlamaForCausalLM)
    options = static(compiler, do_sample=True, top_k=8, repetition_penalty=1.3, max_new_tokens=24)
    plain, assisted, assistant = both(model, INPUTS["one row"], seed=4, **options)
    assert torch.equal(plain, assisted)
    assert assistant.stats.last.accepted > 0


def test_buffers_that_grow_are_compiled_once_more(compiler, widths, monkeypatch):
    monkeypatch.setattr(
        "hf_retrieval_assist.verification.fixed_memory.capacity_bucket",
        lambda slots: -(-slots // 16) * 16,
    )
    model = build(LlamaForCausalLM)
    for new_tokens in (20, 60, 20):
        options = static(compiler, do_sample=False, max_new_tokens=new_tokens)
        plain, assisted, _ = both(model, INPUTS["one row"], oracle={"depth": 0}, **options)
        assert torch.equal(plain, assisted)
    # Plain decoding's two, and one for each capacity: the shorter call went back to the larger.
    assert compiler.graphs == 4
    assert set(widths) == {1}


def test_inference_mode_in_one_call_and_not_in_the_next(compiler):
    model = build(LlamaForCausalLM)
    options = static(compiler, max_new_tokens=8)
    plain = run(model, **options)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(plain, run(model, **options, assistant=knowing(plain)))


def test_states_are_returned_by_plain_decoding(compiler, widths):
    model = build(LlamaForCausalLM)
    options = static(compiler, return_dict_in_generate=True, output_hidden_states=True)
    plain = run(model, **options)
    assistant = knowing(plain)
    assisted = run(model, assistant=assistant, **options)
    assert torch.equal(plain.sequences, assisted.sequences)
    assert assistant.stats.tier == "plain"
    assert not widths


COMPILED = {
    "model": lambda model, compiler: model.compile(backend=compiler, fullgraph=True),
    "forward": lambda model, compiler: setattr(
        model, "forward", torch.compile(model.forward, backend=compiler, fullgraph=True)
    ),
    "body": lambda model, compiler: setattr(
        model, "model", torch.compile(model.model, backend=compiler)
    ),
    "layers": lambda model, compiler: [
        layer.compile(backend=compiler) for layer in model.model.layers
    ],
}


@pytest.mark.parametrize(
    ("part", "inputs"),
    [
        ("forward", "padded"),
        ("layers", "one row"),
        *(pytest.param(part, "one row", marks=pytest.mark.slow) for part in ("model", "body")),
        *(pytest.param(part, "padded", marks=pytest.mark.slow) for part in ("model", "layers")),
    ],
)
def test_models_that_their_callers_compiled(part, inputs, compiler, widths):
    model = build(LlamaForCausalLM)
    COMPILED[part](model, compiler)
    options = {"do_sample": False, "max_new_tokens": 40}
    plain = model.generate(**INPUTS[inputs], **options)
    counts = [compiler.graphs]
    for seed in range(2):
        assistant = oracle_assistant(plain, INPUTS[inputs].get("attention_mask"), seed=seed)
        assert torch.equal(plain, model.generate(**INPUTS[inputs], **options, assistant=assistant))
        assert assistant.stats.tier == "tree"
        assert assistant.stats.last.accepted > 0
        counts.append(compiler.graphs)
    layers = len(model.model.layers) if part == "layers" else 1
    # One for the prompt, where plain decoding has one for it too, and those of the widths.
    assert counts[2] - counts[0] <= layers * (1 + len(set(widths)))
    assert set(widths) <= set(COMPILED_WIDTHS)


def test_a_compiled_wrapper_generates_as_its_model(compiler):
    model = torch.compile(build(LlamaForCausalLM), backend=compiler)
    plain = run(model)
    assert torch.equal(plain, run(model, assistant=knowing(plain)))


def filled(model, cache, *turns, **options):
    """The text after several turns on one cache, in each of which the caller adds tokens."""
    text = PROMPT
    for number, assisted in enumerate(turns):
        plain = run(model, text, max_new_tokens=14, **options)
        assistant = {"assistant": knowing(plain)} if assisted else {}
        found = run(model, text, max_new_tokens=14, **{CACHE: cache}, **options, **assistant)
        assert torch.equal(plain, found), f"turn {number}"
        assert int(cache.get_seq_length()) == found.shape[1] - 1
        text = torch.cat([found, PROMPT[:, : 3 + number]], dim=1)
    return text


TURNS = [(True, False, True), (False, True, True), (True, True, False)]


@pytest.mark.parametrize("turns", TURNS, ids=str)
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Gemma3ForCausalLM])
def test_conversations_on_a_callers_static_cache(model_class, turns):
    model = build(model_class)
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    filled(model, cache, *turns)
    kinds = [type(layer) for layer in StaticCache(model.config, max_cache_len=ROOM).layers]
    assert [type(layer) for layer in cache.layers] == kinds


def test_static_caches_hold_what_plain_decoding_leaves():
    model = build(Gemma3ForCausalLM)
    caches = [StaticCache(config=model.config, max_cache_len=ROOM) for _ in range(2)]
    plain = run(model, **{CACHE: caches[0]}, return_dict_in_generate=True)
    addresses = None
    assistant = knowing(plain)
    for _ in range(2):
        found = run(model, **{CACHE: caches[1]}, assistant=assistant, return_dict_in_generate=True)
        assert torch.equal(found.sequences, plain.sequences)
        assert found[CACHE] is caches[1]
        assert assistant.stats.last.accepted > 0
        for left, right in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(left.keys, right.keys)
            torch.testing.assert_close(left.values, right.values)
        found = [layer.keys.data_ptr() for layer in caches[1].layers]
        assert addresses in (None, found)
        addresses = found
        caches[1].reset()


def test_batches_on_a_static_cache():
    model = build(LlamaForCausalLM)
    first, second = (StaticCache(config=model.config, max_cache_len=ROOM) for _ in range(2))
    options = {"do_sample": False, "max_new_tokens": 20, **INPUTS["padded"]}
    plain = model.generate(**options, **{CACHE: first})
    assistant = oracle_assistant(plain, MASK)
    assert torch.equal(plain, model.generate(**options, **{CACHE: second}, assistant=assistant))
    assert assistant.stats.tier == "tree"
    assert assistant.stats.last.accepted > 0
    text = torch.cat([plain, BATCH[:, :4]], dim=1)
    mask = torch.nn.functional.pad(MASK, (0, text.shape[1] - MASK.shape[1]), value=1)
    options = {"do_sample": False, "max_new_tokens": 10, "attention_mask": mask}
    assert torch.equal(
        model.generate(text, **options, **{CACHE: first}),
        model.generate(text, **options, **{CACHE: second}),
    )


@pytest.mark.parametrize("turns", TURNS[:1], ids=str)
def test_compiled_conversations_on_a_callers_static_cache(turns, compiler):
    model = build(LlamaForCausalLM)
    options = static(compiler)
    del options["cache_implementation"]
    filled(model, StaticCache(config=model.config, max_cache_len=ROOM), *turns, **options)
    assert compiler.graphs >= 2


@pytest.mark.parametrize("beyond", [-1, 0, 1, 7])
def test_a_static_cache_that_is_too_small(beyond):
    model = build(LlamaForCausalLM)
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
    model = build(Gemma3ForCausalLM, layer_types=["sliding_attention"] * 2, num_hidden_layers=2)
    window = model.config.sliding_window
    for room, tier in [(window - 2, "plain"), (window, "tree")]:
        first, second = (StaticCache(config=model.config, max_cache_len=room) for _ in range(2))
        plain = run(model, **{CACHE: first})
        assistant = knowing(plain)
        assert torch.equal(plain, run(model, **{CACHE: second}, assistant=assistant))
        assert assistant.stats.tier == tier


def test_interrupted_calls_leave_a_static_cache_to_go_on_from():
    model = build(LlamaForCausalLM)
    cache = StaticCache(config=model.config, max_cache_len=ROOM)

    def stop(ids, scores):
        if ids.shape[1] > PROMPT.shape[1] + 9:
            raise KeyboardInterrupt
        return scores

    whole = run(model)
    with pytest.raises(KeyboardInterrupt):
        run(model, **{CACHE: cache}, logits_processor=[stop], assistant=knowing(whole))
    assert PROMPT.shape[1] <= int(cache.get_seq_length()) < whole.shape[1]
    prefix = whole[:, : PROMPT.shape[1] + 11]
    assert torch.equal(run(model, prefix), run(model, prefix, **{CACHE: cache}))


def test_its_memory_goes_with_the_model(compiler):
    model = build(LlamaForCausalLM)
    both(model, INPUTS["one row"], **static(compiler, do_sample=False, max_new_tokens=8))
    assert WORKSPACES._idle[model][-1].shape.compiled
    WORKSPACES.release(model)
    assert model not in WORKSPACES._idle


def test_experts_are_computed_as_plain_decoding_does_where_few_tokens_are_fed(monkeypatch):
    model = build(MixtralForCausalLM)
    inside, seen = [], []

    @contextmanager
    def scope(model):
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(MixtralForCausalLM, "_optimize_model_for_decode", scope)
    plain = run(model)

    def look(module, arguments, options, output):
        seen.append((options["input_ids"].shape[1], bool(inside)))

    model.register_forward_hook(look, with_kwargs=True)
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
