"""`generate(assistant=...)` returns what plain `generate` returns, whatever is asked of it."""

import functools

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError
from transformers import GenerationConfig, pipeline

from tests.support.byte_model import byte_tokenizer
from tests.support.lossless import NEW_TOKENS, PROMPT, build, equal, knowing, run
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases, crossed
from tests.support.threads import in_threads

# It compiles a kernel for every length.
ATTENTION = ["eager", "sdpa", "flex_attention"]


def compiled_plainly(model):
    """A plain call, or a skip where the C++ compiler rejects what PyTorch itself wrote for one, as
    flex attention on some CPUs with AVX-512."""
    try:
        run(model)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, CppCompileError):
            raise
        (said, *_) = (line for line in error.inner_exception.output.splitlines() if "error" in line)
        pytest.skip(f"the compiler rejects PyTorch's own kernel: {said.rpartition('error: ')[2]}")


@pytest.mark.parametrize(
    ("model_class", "attention"),
    cases(crossed(["LlamaForCausalLM", "Gemma3ForCausalLM"], ATTENTION), 2),
)
def test_greedy_and_sampled(model_class, attention):
    model = build(model_class, attn_implementation=attention)
    compiled_plainly(model)
    for do_sample in (False, True):
        equal(model, seed=3, do_sample=do_sample)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 1), (1e6, NEW_TOKENS)])
def test_max_time(model, seconds, tokens):
    plain = run(model)
    assisted = run(model, max_time=seconds, assistant=knowing(plain))
    assert torch.equal(assisted, plain[:, : PROMPT.shape[1] + tokens])


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(["<pad>"], pad_token="<pad>")


@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings(model, tokenizer, do_sample):
    free = run(model, do_sample=do_sample)[0].tolist()
    stop = tokenizer.decode(free[-9:-6])
    config = GenerationConfig(stop_strings=stop, max_new_tokens=NEW_TOKENS)
    for given in ({"stop_strings": [stop, "nowhere"]}, {"generation_config": config}):
        plain, _, _ = equal(model, tokenizer=tokenizer, do_sample=do_sample, **given)
        assert plain.shape[1] < len(free)
    assert config.stop_strings == stop


def test_pipelines(model, tokenizer):
    text = tokenizer.decode(PROMPT[0])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    pipe = functools.partial(pipeline, "text-generation", model=model, tokenizer=tokenizer)
    plain, given = pipe()(text, **options), {"assistant": knowing(run(model))}
    for of_pipeline, of_call in (({}, given), (given, {})):
        assert pipe(**of_pipeline)(text, **options, **of_call) == plain
        assert given["assistant"].stats.last.accepted > 0
    assert given["assistant"].stats.total.calls == 2


def test_threads_share_an_assistant(model):
    prompts = [PROMPT, PROMPT.flip(1), PROMPT[:, 3:], PROMPT + 2]
    plain = [run(model, ids) for ids in prompts]
    assistant = knowing(*plain)
    numbers = range(8)
    found = in_threads(lambda i: run(model, prompts[i % 4], assistant=assistant), numbers)
    assert all(torch.equal(found[i], plain[i % 4]) for i in numbers)
    assert assistant.stats.total.calls == 8
    assert assistant.stats.total.accepted > 0


@pytest.mark.parametrize(
    "inputs",
    [{}, {"inputs": PROMPT}, {"input_ids": PROMPT[:, :1]}, {"input_ids": PROMPT, "max_length": 20}],
    ids=lambda inputs: "-".join(inputs) or "none",
)
def test_ways_to_give_the_prompt(model, inputs):
    options = {"max_length": 16} | inputs
    agreeing(model, options, make=knowing, do_sample=False)
