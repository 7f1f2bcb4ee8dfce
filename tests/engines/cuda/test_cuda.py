"""The lossless checks on a GPU."""

import copy
import gc
import threading
import time
from itertools import chain

import pytest
import torch
import transformers

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.decoding.loop import Generation
from hf_retrieval_assist.decoding.selection import TokenSelector
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.host.transformers_private import compilations
from tests.support.heads import DRAFTERS, layers_of
from tests.support.lossless import INPUTS, PROMPT, build, equal, padded, run, same
from tests.support.op_recorder import idle
from tests.support.oracle_drafter import OracleDrafter, agreeing, oracle_assistant
from tests.support.rounding import OF_MODEL, within
from tests.support.tree_case import TOLERANCE, Case
from tests.support.watching import calls_of

from .test_node_choices import OPTIONS as CHOICES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
CLASSES = [
    transformers.LlamaForCausalLM,
    transformers.Qwen3ForCausalLM,
    transformers.Gemma3ForCausalLM,
    transformers.MixtralForCausalLM,
    transformers.GPT2LMHeadModel,
    transformers.OPTForCausalLM,
]


@pytest.fixture(scope="module", params=CLASSES)
def any_model(request):
    return build(request.param).to(DEVICE)


@pytest.fixture(scope="module")
def llama():
    return build(transformers.LlamaForCausalLM).to(DEVICE)


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CHOICES)
def test_tokens_of_all_nodes_are_plain_decodings(llama, name, rows, monkeypatch):
    """The state of the generator too; the walk processes no scores of its own, and without a
    processor there is nothing to be processed."""
    walked = calls_of(monkeypatch, TokenSelector, "process")
    inputs = {key: x.to(DEVICE) for key, x in padded(rows).items()}
    options = {"do_sample": True, "max_new_tokens": 40, "pad_token_id": 0} | CHOICES[name]
    for _ in range(3):
        torch.manual_seed(4)
        plain = llama.generate(**inputs, **options)
        left = torch.cuda.get_rng_state()
        assistant = oracle_assistant(plain, inputs["attention_mask"])
        walked.clear()
        torch.manual_seed(4)
        assert torch.equal(plain, llama.generate(**inputs, **options, assistant=assistant))
        assert torch.equal(torch.cuda.get_rng_state(), left)
        assert assistant.stats.last.keeps_seed
        assert [len(processed) for _, processed, _ in walked] == [rows] * (name != "all")


@pytest.mark.parametrize("graphs", [True, "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_graphs(llama, dtype, graphs):
    model = copy.deepcopy(llama).to(dtype)
    plain = run(model, max_new_tokens=60)
    drafter = OracleDrafter(plain.tolist())
    for _ in range(2):
        assistant = Assistant([drafter], budget=16, graphs=graphs)
        assisted = run(model, max_new_tokens=60, assistant=assistant)
        if dtype is torch.float32:
            assert torch.equal(plain, assisted)
    steps = idle(model).kinds.values()
    assert any(step.trusted for step in steps)
    assert [step.fault for step in steps] == [None] * len(steps)


@pytest.mark.parametrize(
    ("rows", "graphs", "attention"),
    [("one row", "fused", "sdpa"), ("padded", True, "sdpa"), ("one row", True, "eager")],
)
def test_graphs_of_any_model(any_model, rows, graphs, attention):
    any_model.set_attn_implementation(attention)
    inputs = {name: tensor.to(DEVICE) for name, tensor in INPUTS[rows].items()}
    for _ in range(3):
        agreeing(any_model, inputs, "tree", graphs=graphs, do_sample=False, max_new_tokens=60)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_which_attention_serves(llama, attention):
    """The kernels of Triton, whatever the model was loaded with."""
    model = copy.deepcopy(llama).to(torch.bfloat16)
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as missing:
        pytest.skip(str(missing))
    run(model, max_new_tokens=60, assistant=oracle_assistant(run(model, max_new_tokens=60)))
    assert idle(model).shape.attention_by == "triton"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_card(llama):
    """While the first one is the current device."""
    other, inputs = copy.deepcopy(llama).to("cuda:1"), {"input_ids": PROMPT.to("cuda:1")}
    for _ in range(2):
        agreeing(other, inputs, tier="tree", do_sample=False, max_new_tokens=60)
    assert idle(other).shape.device == torch.device("cuda:1")


class Waiting(torch.nn.Module):
    """A head that waits for the device, as no hook of the caller's does that is recorded."""

    def __init__(self, head):
        super().__init__()
        self.head, self.weight = head, head.weight

    def forward(self, states):
        torch.cuda.synchronize()
        return self.head(states)


def test_a_draw_after_a_failed_recording(llama):
    """What waits for the device without an operator shows only while it is captured."""
    model = copy.deepcopy(llama)
    model.lm_head = Waiting(model.lm_head)
    same(model, assistant=oracle_assistant, max_new_tokens=40)
    assert WORKSPACES.report(model).faults
    assert torch.rand(4, device=DEVICE).shape == (4,)
    equal(model, seed=3, **SAMPLED)


def call_of_another_model(x):
    run(build().to(DEVICE), max_new_tokens=60, assistant=SamAssistant(budget=4))


OTHERS = {
    "records": call_of_another_model,
    "draws": lambda x: torch.multinomial(x, 1),
    "waits for the device": lambda x: torch.cuda.synchronize(),
    "empties the cache": lambda x: torch.cuda.empty_cache(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_threads_go_on_while_one_records(llama, other):
    """Both do: captures that were broken are made again. Only that a capture begins at the very
    moment may be seen by a draw that no call of this package makes."""
    model, errors, done = copy.deepcopy(llama), [], threading.Event()
    plain = run(model, max_new_tokens=60)

    def work():
        x = torch.rand(64, 64, device=DEVICE)
        while not done.is_set():
            try:
                OTHERS[other](x)
            except RuntimeError as error:
                errors.append(error)
            time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            assistant = oracle_assistant(plain)
            assert torch.equal(plain, run(model, max_new_tokens=60, assistant=assistant))
    finally:
        done.set()
        thread.join()
    assert assistant.stats.last.repeated > 0
    assert len(errors) <= 2, errors


@pytest.mark.parametrize("kind", ["draft model", "EAGLE", "MTP"])
def test_drafts_are_recorded(llama, kind):
    """Calls after the first ones record nothing."""
    if kind == "draft model":
        fallback = drafting = copy.deepcopy(llama)
    else:
        fallback = DRAFTERS[kind](llama)
        drafting = layers_of(fallback, llama)
    plain, made = run(llama, max_new_tokens=60), []
    for graphs in (False, True, True, True):
        assistant = SamAssistant(fallback=fallback, budget=12, graphs=graphs)
        assert torch.equal(plain, run(llama, max_new_tokens=60, assistant=assistant))
        assert assistant.stats.last.drafted > 0
        made.append(WORKSPACES.report(drafting).made)
    assert not WORKSPACES.report(drafting).faults
    assert made[0] == 0 < made[1]
    assert made[2] == made[3]


WAITLESS = {name: options for name, options in CHOICES.items() if name != "eta"}


@pytest.mark.parametrize("name", ["argmax", *WAITLESS])
def test_a_step_waits_once(llama, name, monkeypatch):
    """The event that says the results have arrived is no synchronising call of PyTorch's."""
    options = {"do_sample": name != "argmax", "max_new_tokens": 60} | WAITLESS.get(name, {})
    plain = run(llama, **options)
    for _ in range(3):
        run(llama, **options, assistant=oracle_assistant(plain))
    step = Generation.step
    watched = []

    def guarded(generation):
        # Recording and comparing may wait.
        workspace = generation.forward.verifier.memory.workspace
        settled = all(s.decided for s in workspace.kinds.values())
        torch.cuda.set_sync_debug_mode("error" if settled else "default")
        try:
            step(generation)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        watched.append(settled)

    monkeypatch.setattr(Generation, "step", guarded)
    assert torch.equal(plain, run(llama, **options, assistant=oracle_assistant(plain)))
    assert any(watched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9}], ids=str)
def test_at_one_width_nothing_depends_on_drafts(any_model, options, dtype):
    """Texts, and of greedy calls the logits: in half precision bit for bit, in float32, where a
    product's sums depend on the row, up to rounding."""
    if isinstance(any_model, transformers.MixtralForCausalLM):
        pytest.skip("experts are fed what is routed to them, whatever the width")
    model = copy.deepcopy(any_model).to(dtype)
    names = () if options else ("logits",)
    told = {"return_dict_in_generate": True, "output_logits": bool(names)}
    options = options | told | {"max_new_tokens": 60}
    undrafted = Assistant([], budget=15, fixed_width=16)
    expected = run(model, **options, assistant=undrafted)
    for seed in range(4):
        assistant = oracle_assistant(expected, budget=15, fixed_width=16, seed=seed)
        actual = run(model, **options, assistant=assistant)
        assert assistant.stats.last.accepted > 0
        assert torch.equal(actual.sequences, expected.sequences)
        pairs = [zip(actual[name], expected[name], strict=True) for name in names]
        for found, wanted in chain(*pairs):
            bounds = within(wanted, OF_MODEL) if dtype is torch.float32 else {"atol": 0, "rtol": 0}
            torch.testing.assert_close(found, wanted, **bounds)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("depth", [64, 80, 96, 128, 160, 192, 256, 512])
@pytest.mark.parametrize("width", [1, 9, 70])
def test_attention_of_every_head(depth, width, dtype):
    """The kernels are those compiled for this card; padded rows and windows too."""
    for kinds in ({}, {"reach": 40, "out_depth": 128}, {"sinks": True, "softcap": 1.5}):
        with torch.device(DEVICE):
            assert Case(4, 2, depth, width, dtype, [301, 40], **kinds).error() < TOLERANCE[dtype]


@pytest.mark.parametrize("graphs", [True, False])
def test_no_kernel_of_attention_is_planned_anew(llama, graphs):
    """cuDNN plans a kernel for every new shape, which takes longer than a step."""
    plain = run(llama, max_new_tokens=60)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
        assistant = oracle_assistant(plain)
        assistant.policy.graphs = graphs
        run(llama, max_new_tokens=60, assistant=assistant)
    assert not [event.key for event in seen.key_averages() if "cudnn" in event.key.lower()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_compiled_steps_are_graphs(llama, mode):
    """They are the package's own, one launch a step, whatever mode the caller compiled in."""
    model = copy.deepcopy(llama)
    config = transformers.CompileConfig(mode=mode)
    options = {"cache_implementation": "static", "max_new_tokens": 60, "compile_config": config}
    plain = run(model, **options)
    before = compilations()
    for _ in range(3):
        assistant = oracle_assistant(plain)
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
            assert torch.equal(plain, run(model, assistant=assistant, **options))
        assert assistant.stats.last.accepted > 0
    assert compilations() == before
    assert {key.cost_variant for key in assistant.costs._models} == {"recorded"}
    assert idle(model).shape.attention_by == "triton"
    steps = idle(model).kinds.values()
    assert any(step.trusted for step in steps)
    assert [step.fault for step in steps] == [None] * len(steps)
    launched = sum(one.count for one in seen.key_averages() if one.key == "cudaGraphLaunch")
    assert launched == assistant.stats.last.forwards


def test_memory_goes_with_the_model(llama):
    model = copy.deepcopy(llama)
    run(model, assistant=SamAssistant(budget=4))
    assert idle(model).arena.nbytes > 0
    taken = torch.cuda.memory_allocated()
    nbytes = idle(model).arena.nbytes
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() <= taken - nbytes
