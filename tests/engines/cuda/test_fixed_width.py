"""Calls all of whose forwards feed equally many tokens, on the CPU as on an accelerator."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.engines.cuda.workspace import Workspace
from tests.support.lossless import build, padded, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant
from tests.support.quick import cases
from tests.support.watching import calls_of

WIDTH = 8
OPTIONS = {"max_new_tokens": 40, "pad_token_id": 0}


@pytest.fixture
def static_buffers(monkeypatch):
    serve_in_place(monkeypatch)


def drafting(result, inputs, seed=0):
    """An assistant that hides a text, or a bit of it, among wrong branches."""
    mask = inputs.get("attention_mask")
    return oracle_assistant(result, mask, budget=16, fixed_width=WIDTH, seed=seed)


def generate(model, rows, assistant, **options):
    torch.manual_seed(4)
    return model.generate(**padded(rows), **(OPTIONS | options), assistant=assistant)


def undrafted():
    return Assistant([], budget=16, fixed_width=WIDTH, reroute=False, trust_forward=True)


@pytest.fixture
def fed(monkeypatch):
    """Tokens per row of forwards behind prompts, the self-test's among them."""
    return calls_of(monkeypatch, Workspace, "step")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("static_buffers")
def test_one_width_is_fed(rows, fed):
    """While texts grow, and while the cache catches up on a row that ended early; of a model whose
    test for other calls was wider."""
    model = build(LlamaForCausalLM)
    generate(model, rows, SamAssistant(budget=4 * WIDTH, trust_forward=True))
    start = padded(rows)["input_ids"].shape[1]
    free = generate(model, rows, undrafted(), do_sample=True)[:, start:].tolist()
    others = {token for text in free[1:] for token in text}
    end = next(token for token in free[0][12:] if token not in {*free[0][:12]} | others)
    options = {"do_sample": True, "eos_token_id": end, "return_dict_in_generate": True}
    plain = generate(model, rows, undrafted(), **options).sequences
    assert rows == 1 or plain.shape[1] - start > 3 * WIDTH
    for assistant in (undrafted(), drafting(plain, padded(rows))):
        fed.clear()
        assert torch.equal(generate(model, rows, assistant, **options).sequences, plain)
        assert {width for _, width, _ in fed} == {WIDTH}
    assert assistant.stats.last.accepted > 0


KINDS = [
    (Gemma3ForCausalLM, torch.bfloat16),
    (LlamaForCausalLM, torch.float32),
    (LlamaForCausalLM, torch.bfloat16),
    (GPT2LMHeadModel, torch.float16),
]


@pytest.mark.parametrize(
    ("model_class", "dtype", "rows"), cases([(*kind, n) for n in (3, 1) for kind in KINDS], 2)
)
@pytest.mark.usefixtures("static_buffers")
def test_logits_do_not_depend_on_drafts(rows, model_class, dtype):
    """Bit for bit, whatever is drafted and accepted."""
    model = build(model_class).to(dtype)
    names = ("return_dict_in_generate", "output_logits")
    options = {"do_sample": False} | dict.fromkeys(names, True)
    expected = generate(model, rows, undrafted(), **options)
    for seed in range(2):
        assistant = drafting(expected, padded(rows), seed)
        actual = generate(model, rows, assistant, **options)
        assert assistant.stats.last.accepted > 0
        assert torch.equal(actual.sequences, expected.sequences)
        torch.testing.assert_close(actual.logits, expected.logits, atol=0, rtol=0)


def test_widths_that_were_not_tested_are_refused(monkeypatch):
    """Nor is one served where no memory stays in place."""
    with pytest.raises(ValueError, match="fixed_width: expected None where no memory stays"):
        run(build(LlamaForCausalLM), assistant=SamAssistant(fixed_width=16))
    serve_in_place(monkeypatch)
    with pytest.raises(ValueError, match=r"fixed_width: expected one of \[1, 2, .*, got 5"):
        run(build(LlamaForCausalLM), assistant=SamAssistant(fixed_width=5))
    with pytest.raises(ValueError, match="fixed_width: expected at least 1, got 0"):
        SamAssistant(fixed_width=0)
