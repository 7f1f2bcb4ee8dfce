"""Calls that transformers' own loop decodes."""

import pytest
import torch
import transformers

from hf_retrieval_assist import SamAssistant, attach
from tests.support.lossless import build
from tests.support.quick import cases, crossed
from tests.support.wrapped_models import RUNTIMES

PROMPTS = torch.tensor([[0, 0, 5, 9, 33, 21, 60, 7], [44, 9, 33, 12, 18, 50, 9, 33]])
MASK = (PROMPTS > 0).long()


def run(model, prompts=PROMPTS, mask=MASK, **options):
    transformers.set_seed(3)
    options = {"max_new_tokens": 24, "do_sample": False} | options
    return model.generate(prompts, attention_mask=mask, **options)


def test_rows_count_up_to_their_ends_as_drafted_ones_do(model):
    free = run(model)[:, PROMPTS.shape[1] :].tolist()
    end = free[0][5]
    lengths = [row.index(end) + 1 if end in row else len(row) for row in free]
    assert min(lengths) < max(lengths)
    assistant, drafted = SamAssistant(), SamAssistant(budget=0)
    run(model, eos_token_id=end, assistant=assistant, use_cache=False)
    run(model, eos_token_id=end, assistant=drafted)
    last, other = assistant.stats.last, drafted.stats.last
    assert (last.tier, other.tier) == ("plain", "tree")
    assert last.tokens == other.tokens == sum(lengths)
    assert last.steps == other.steps == sum(lengths) - len(lengths)
    assert last.forwards == other.forwards == max(lengths) - 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_cache": False}, "use_cache is False; set it to True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "ask for none"),
        ({}, "; call model.eval()"),  # the model is in train mode
    ],
)
def test_a_call_that_cannot_be_assisted_says_so_once(told, options, why):
    model, assistant = build(), SamAssistant()
    if not options:
        model.train().config.attention_dropout = 0.3
    for _ in range(2):
        run(model, assistant=assistant, **options)
    (said,) = [text for text in told.messages if "cannot draft here: " in text]
    assert why in said
    assert options or len(told.messages) == 1
    assert assistant.stats.last.summary.startswith(f"not assisted ({assistant.stats.last.reason})")


def test_the_log_is_as_loud_as_transformers(model, told):
    transformers.logging.set_verbosity_error()
    run(model, assistant=SamAssistant(), use_cache=False)
    assert not told.messages
    transformers.logging.set_verbosity_info()
    run(model.to(torch.float64), assistant=SamAssistant())
    model.to(torch.float32)
    assert "LlamaForCausalLM: tree (" in told.text


def test_the_first_call_of_a_model_says_what_takes_its_time(told):
    fresh = build()
    assistant = SamAssistant()
    for _ in range(2):
        run(fresh, assistant=assistant)
    (said,) = told.messages
    assert said.startswith("LlamaForCausalLM: the first call with an assistant tests how drafts")
    assert 0 < assistant.stats.last.seconds["test"] < assistant.stats.total.seconds["test"]
    assert " (ms: test " in str(assistant.stats.last)


@pytest.mark.parametrize(
    ("kind", "sample", "keyword"),
    cases(crossed(RUNTIMES, [False, True], ["assistant", "custom_generate"]), 3),
)
def test_a_runtime_that_is_no_module_is_decoded_plainly(llama, told, kind, sample, keyword):
    runtime, assistant = kind(llama), SamAssistant()
    plain = run(llama, do_sample=sample)
    assert torch.equal(plain, run(runtime, do_sample=sample))
    assert torch.equal(plain, run(runtime, do_sample=sample, **{keyword: assistant}))
    assert assistant.stats.last.tier == "plain"
    assert f"{kind.__name__}: the assistant cannot draft here: it is no torch module" in told.text
    with pytest.raises(TypeError, match="model: expected a transformers model"):
        attach(runtime, assistant)
