"""Continuous batching with drafts generates what it would without them."""

import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant
from hf_retrieval_assist.drafters.base import FeedbackNeeds
from hf_retrieval_assist.engines.cpu import norms
from hf_retrieval_assist.engines.cpu.program import Program
from hf_retrieval_assist.extensions.serving import methods, paged
from hf_retrieval_assist.extensions.serving.drafts import RequestDrafts
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.batching import (
    LENGTH,
    DraftedRequest,
    add,
    drafted,
    greedy,
    guess,
    half_knowing,
    half_known,
    hosted,
    manager_of,
    numbered,
    outputs,
    prompts,
    results,
    run,
    texts,
)
from tests.support.fixed_costs import FixedCosts
from tests.support.laws import assert_follows, exact_law
from tests.support.lossless import build
from tests.support.memories import remembering
from tests.support.rounding import near
from tests.support.scripted import Scripted
from tests.support.watching import calls_of, results_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 256, "num_blocks": 8},
        {"max_batch_tokens": 12},
        {"allow_block_sharing": False},
        {"num_blocks": 12},  # not all requests fit side by side
        {"scheduler_type": "prefill_first"},
        {"max_requests_per_batch": 3},
        # Prompts that cannot begin yet take nothing of a step.
        {"max_requests_per_batch": 2, "max_batch_tokens": 32},
    ],
    ids=str,
)
def test_greedy_requests(llama, options):
    total = drafted(llama, prompts(), **options)
    assert (total.calls, total.tokens) == (8, 8 * LENGTH)
    assert 0 < total.accepted < total.drafted
    # The prompt brings the first token of each, and every accepted one saves a step.
    assert total.steps == total.tokens - total.calls - total.accepted


@pytest.mark.parametrize(
    ("name", "attention", "budget", "changes"),
    [
        ("Gemma3ForCausalLM", "sdpa", 5, {}),
        ("Gemma3ForCausalLM", "eager", 5, {}),
        ("MistralForCausalLM", "eager", 5, {}),
        # A window keeps no more of what is fed at once than its size.
        ("MistralForCausalLM", "sdpa", 24, {"sliding_window": 6}),
    ],
)
def test_windows_that_go_round(name, attention, budget, changes):
    model = build(getattr(transformers, name), **changes)
    model.set_attn_implementation(attention)
    make = partial(half_knowing, budget=budget)
    total = drafted(model, prompts(seed=1), greedy(max_new_tokens=40), make)
    assert 0 < total.accepted < total.drafted


@pytest.mark.parametrize(
    ("name", "changes", "repeats"),
    [
        ("LlamaForCausalLM", {}, True),
        ("GPT2LMHeadModel", {}, True),
        ("Gemma3ForCausalLM", {}, True),
        ("MistralForCausalLM", {"sliding_window": 6}, True),
        # Some of its layers see what others have shown.
        ("Gemma3nForCausalLM", {}, False),
    ],
)
def test_steps_are_repeated(name, changes, repeats, monkeypatch):
    """Of requests that come and go, with drafts and without, also of a model that has changed."""
    model, config = build(name, **changes), greedy(max_new_tokens=40)
    repeated, short = calls_of(monkeypatch, Program, "run"), prompts()
    for inputs in (short, short, prompts(3, seed=1)):
        plain = run(model, inputs, config)
        for assistant in (half_knowing(inputs, plain), half_knowing(inputs, plain, budget=0)):
            repeated.clear()
            assert run(model, inputs, config, assistant=assistant) == plain
            # Some of the kinds of forwards are recorded and compared meanwhile.
            assert len(repeated) > assistant.stats.total.forwards // 20 if repeats else not repeated
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.flip(0))


def test_drafts_are_no_longer_than_what_is_repeated(llama, monkeypatch):
    """Longer ones would round otherwise in half precision than no drafts do."""
    fed = results_of(monkeypatch, RequestDrafts, "fill", lambda tokens, *_: tokens)
    inputs, plain, assistant = half_known(llama, 8, budget=40)
    assert run(llama, inputs, assistant=assistant, max_batch_tokens=256) == plain
    assert fed[0] > 64 == max(fed[1:])


@pytest.mark.parametrize("why", ["graphs=False", "a hook", "a module of the caller's"])
def test_steps_that_are_not_repeated(why, monkeypatch):
    model, repeated = build(), calls_of(monkeypatch, Program, "run")
    memory = calls_of(monkeypatch, paged, "_PagedLayer")
    mlp = model.model.layers[0].mlp
    if why == "a hook":
        mlp.register_forward_hook(lambda *_: None)
    elif why != "graphs=False":
        mlp.__class__ = type("Mlp", (type(mlp),), {"forward": lambda self, x: x.flip(-1)})
    drafted(model, prompts(), make=partial(half_knowing, graphs=why != "graphs=False"))
    assert not repeated
    # What a GPU has is transformers' cache already.
    assert bool(memory) == (why == "a module of the caller's")


@pytest.mark.parametrize("count", [1, 6])
def test_requests_share_the_time_of_steps(llama, count):
    inputs, plain, assistant = half_known(llama, count, costs=FixedCosts(lambda n: 9.0))
    begun = time.perf_counter()
    assert run(llama, inputs, assistant=assistant) == plain
    elapsed = time.perf_counter() - begun
    total = assistant.stats.total
    assert (total.forwards, total.saved_forwards) == (total.steps, total.accepted)
    seconds = dict(total.seconds)
    whole = seconds.pop("total")
    assert 0 < whole < elapsed
    assert sum(seconds.values()) == near(whole)
    assert min(seconds[phase] for phase in ("prefill", "draft", "forward")) > 0
    run(llama, inputs, greedy(max_new_tokens=4), assistant=assistant)
    assert assistant.stats.last.seconds["total"] > 0
    assert "fast" not in assistant.stats.last.summary


def test_what_requests_wrote_is_drafted_to_later_ones(llama):
    """Those whose texts end early get one as well, and while the assistant is attached."""
    inputs = prompts()
    assistant = remembering(memory=OutputMemory(), budget=8)
    plain = run(llama, inputs)
    assert run(llama, inputs, assistant=assistant) == plain
    before = assistant.stats.total.steps
    assert run(llama, inputs, assistant=assistant) == plain
    assert assistant.stats.total.steps - before < 0.7 * before
    tokens = Counter(token for text in plain for token in text)
    ends = [token for token, _ in tokens.most_common(3)]
    config = greedy(eos_token_id=ends, max_new_tokens=30)
    plain = run(llama, inputs, config)
    assert len({*map(len, plain)}) > 1
    calls = assistant.stats.total.calls
    with assistant.attached(llama):
        assert run(llama, inputs, config) == plain
        assert run(llama, inputs, config, assistant=None) == plain
    assert assistant.stats.total.calls == calls + len(inputs)
    with pytest.raises(TypeError, match=r"^assistant: expected an Assistant, got str"):
        run(llama, inputs, assistant="sam")


def test_cancelled_requests_leave_no_block_behind(llama):
    inputs, plain, assistant = half_known(llama, 6)
    with manager_of(llama, assistant) as manager:
        add(manager, inputs)
        manager.add_request(inputs[0], request_id="cancelled", max_new_tokens=500)
        manager.cancel_request("cancelled")
        assert texts(manager, len(inputs)) == numbered(plain)
        manager.add_request(inputs[0], request_id="last", max_new_tokens=2)
        assert [*texts(manager, 1)] == ["last"]
        cache = manager.batch_processor.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1.0
        assert all(not allocator.block_table for allocator in cache.cache_allocators.values())
    assert assistant.stats.total.calls >= len(inputs) + 1


def test_drawn_tokens_have_plain_decodings_distribution():
    model = build(LlamaForCausalLM, vocab_size=6, num_hidden_layers=1)
    prompt = [1, 2, 3]
    config = greedy(do_sample=True, max_new_tokens=3, top_k=None)
    options = {"assistant": Assistant([guess(4)], budget=2), "seed": 3, "num_blocks": 512}
    assert_follows(run(model, [prompt] * 3000, config, **options), exact_law(model, prompt))


def test_warpers_are_each_requests_own(llama):
    inputs, plain, assistant = half_known(llama, 4)
    config = greedy(do_sample=True, temperature=0.7, top_k=5)
    with manager_of(llama, assistant, config, per_request_processors=True) as manager:
        # Whose temperature the others would have, were they taken for the first one.
        manager.add_request(inputs[0], request_id="warm", temperature=9.0)
        # So cold that they are as good as greedy.
        add(manager, inputs, *[{"top_k": 1}, {"temperature": 1e-4}] * 2)
        found = texts(manager, 1 + len(inputs))
    assert found.items() > numbered(plain).items()
    assert assistant.stats.total.accepted > 0


def streamed(model, inputs, assistant):
    """The lengths at which each request's stream was, and its tokens; requests arrive in turn."""
    seen = {}
    with manager_of(model, assistant) as manager:
        add(manager, inputs, max_new_tokens=12, streaming=True)
        for output in outputs(manager, len(inputs)):
            seen.setdefault(output.request_id, []).append([*output.generated_tokens])
    return seen


def test_streams_get_every_token_and_log_probabilities_are_those_of_each(llama):
    inputs, _, assistant = half_known(llama, 4)
    assert streamed(llama, inputs, assistant) == streamed(llama, inputs, None)
    assert assistant.stats.total.accepted > 0
    plain, found = (
        results(llama, inputs, return_logprobs=True, **named)
        for named in ({}, {"assistant": assistant})
    )
    for one, other in zip(plain, found, strict=True):
        assert one.generated_tokens == other.generated_tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("module", "name", "value", "shown"),
    [
        (
            methods,
            "CONTINUOUS_BATCHING",
            ("transformers:GenerationMixin.gone",),
            "GenerationMixin.gone",
        ),
        (hosted, "_why_not", lambda processor: "no room", "without the assistant (no room)"),
    ],
)
def test_where_nothing_can_be_drafted_requests_are_decoded_plainly(
    llama, module, name, value, shown, monkeypatch, told
):
    """Where a release of transformers lacks something, or a configuration leaves no room."""
    monkeypatch.setattr(module, name, value)
    assert drafted(llama, prompts(2)).steps == 0
    assert "continuous batching without the assistant" in told.text
    assert shown in told.text


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("use_async_batching", True, "use_async_batching=False"),
        ("model_runner.pad_inputs", True, "use_cuda_graph=False"),
        ("distributed_helper.tp_size", 2, "ranks"),
        ("logit_processor.logits_processor", [transformers.LogitsProcessor()], "LogitsProcessor"),
    ],
)
def test_why_a_configuration_leaves_no_room_for_drafts(path, value, why):
    some = SimpleNamespace
    processor = some(use_async_batching=False, model_runner=some(pad_inputs=False))
    processor.distributed_helper = some(tp_size=1)
    processor.logit_processor = some(logits_processor=())
    assert hosted._why_not(processor) is None
    owner, _, name = path.rpartition(".")
    setattr(getattr(processor, owner) if owner else processor, name, value)
    assert why in hosted._why_not(processor)


def test_a_request_may_have_a_twin_of_the_assistant(llama):
    inputs = prompts(3)
    plain = run(llama, inputs)
    memory = OutputMemory()
    assistant = SamAssistant(memory=memory, budget=8, fallback=None)
    twins = [None, assistant.private(), assistant.expecting(plain[2])]
    with manager_of(llama, assistant) as manager:
        for name, twin, prompt in zip("abc", twins, inputs, strict=True):
            assert manager.add_request(prompt, request_id=name, assistant=twin) == name
        assert manager.add_request(inputs[1], assistant=assistant.private()) not in "abc"
        found = texts(manager, 4)
        with pytest.raises(ValueError, match="a twin of the manager's own"):
            manager.add_request(inputs[0], assistant=SamAssistant())
    assert [found[name] for name in "abc"] == plain
    assert {*map(tuple, found.values())} == {*map(tuple, plain)}
    # The private ones were never known.
    assert len(memory) == 2
    total = assistant.stats.total
    assert total.calls == 4
    assert total.expected_accepted > LENGTH - 4
    assert total.accepted > LENGTH // 2


@pytest.mark.parametrize("num_blocks", [64, 3])
def test_twins_serve_every_sequence_of_a_request(llama, num_blocks, monkeypatch):
    """Also where the cache has no room for all at once, and some begin anew."""
    begun_anew = calls_of(monkeypatch, DraftedRequest, "create_equivalent_initial_request")
    memory = OutputMemory()
    assistant = SamAssistant(memory=memory, budget=8)
    config = greedy(num_return_sequences=3, do_sample=True, max_new_tokens=8)
    with manager_of(llama, assistant, config, num_blocks=num_blocks) as manager:
        manager.add_request(range(1, 41), assistant=assistant.private())
        assert len([*outputs(manager, 3)]) == 3
    assert bool(begun_anew) == (num_blocks == 3)
    assert len(memory) == 0
    # Prompts that begin alike.
    inputs = [[7, 8, 9] * 12 + [token] for token in range(1, 6)]
    config = greedy(num_return_sequences=2, do_sample=True, top_k=1)
    assert drafted(llama, inputs, config, lambda *_: remembering(budget=5)).accepted > 0


@pytest.mark.parametrize("rerouted", [True, False])
def test_drafters_are_shown_what_the_forwards_showed(llama, rerouted, monkeypatch):
    """Whoever had drafted the tokens; and the steps run by the kernels."""
    normed, seen, came = calls_of(monkeypatch, norms, "fused_norm"), [], []

    def commit(tokens, feedback):
        if feedback is not None:
            # Which tokens the logits say come next, behind the accepted ones, and which came.
            best, _ = feedback.top.of(feedback.accepted.astype(np.int64), 1, 67)
            seen.append(best[:, 0].tolist())
            came.append(list(tokens))

    def make(*known):
        normed.clear()
        # A token that no text has.
        tree = TokenTree.build([66], [-1], [0.9])
        needs = FeedbackNeeds(top_k=1)
        seeing = Scripted(lambda budget: tree, commit, name="seeing", needs=needs)
        drafters = [*half_knowing(*known).drafters, seeing]
        return Assistant(drafters, budget=5, reroute=rerouted)

    drafted(llama, prompts(4), make=make)
    assert came == seen
    assert sum(map(len, came)) == 4 * LENGTH
    assert max(map(len, came)) > 2
    assert bool(normed) == rerouted
