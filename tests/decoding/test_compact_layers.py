"""Calls whose float32 layers are read as bfloat16: the same tokens, the same logits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding import compact_layers, output_layer
from hf_retrieval_assist.kernels import compact, linear
from hf_retrieval_assist.kernels.compact import COMPACT
from hf_retrieval_assist.kernels.skinny import compact_linear
from tests.decoding.test_batches import padded
from tests.support.lossless import build, run

# Large enough for the kernels.
TOKENS, HIDDEN = 4096, 64


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output_layer, "PATIENCE", 1)
    monkeypatch.setattr(compact_layers, "PATIENCE", 1)
    # The machine's own choice may be another.
    monkeypatch.setattr(compact, "is_kernel", lambda weight: True)
    linear.set_chooser(lambda weight: linear.kernel_linear, linear.LEAST_ELEMENTS)
    gc.collect()  # copies of other tests' models
    yield
    linear.set_chooser(linear.TUNING.choose, linear.LEAST_ELEMENTS)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with a copy."""
    rows: list[int] = []

    def count(x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(x.numel() // x.shape[-1])
        return compact_linear(x, *others)

    monkeypatch.setattr(compact, "compact_linear", count)
    return rows


def model_of(kind: Any = transformers.LlamaForCausalLM, **options: Any) -> Any:
    model = build(kind, vocab_size=TOKENS, hidden_size=HIDDEN, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_k": 0, "typical_p": 0.9}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "typical", "top-k"],
)
def test_tokens_are_plain_decodings(kind: str, options: Any, products: list[int]) -> None:
    model = model_of(getattr(transformers, kind))
    plain = run(model, **options)
    assistant = SamAssistant()
    for _ in range(2):
        assert torch.equal(run(model, assistant=assistant, **options), plain)
    assert assistant.stats.last.seconds["pack"] >= 0
    screened = "typical_p" not in options  # then the output layer has eight bits
    assert bool(products) != screened
    assert all(rows <= compact.MOST_ROWS for rows in products)


def test_logits_have_the_same_bits(products: list[int]) -> None:
    model = model_of()
    shown = {"output_logits": True, "return_dict_in_generate": True}
    expected = run(model, assistant=SamAssistant(budget=4, extra_memory=0), **shown)
    assert not products
    found = run(model, assistant=SamAssistant(budget=4), **shown)
    assert products
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


def test_batches(products: list[int]) -> None:
    model, inputs = model_of(), padded(2)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options["return_dict_in_generate"] = True
    plain = model.generate(**inputs, **options)
    found = model.generate(**inputs, **options, assistant=SamAssistant())
    assert torch.equal(found.sequences, plain.sequences)
    assert products


def test_weights_that_change_between_calls(products: list[int]) -> None:
    model, shown = model_of(), {"output_logits": True, "return_dict_in_generate": True}
    run(model, assistant=SamAssistant(), **shown)
    known = COMPACT.nbytes()
    assert known > 0
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    assert torch.equal(
        run(model, assistant=SamAssistant(), **shown).sequences, run(model, **shown).sequences
    )
    assert COMPACT.nbytes() == known
    with torch.no_grad():
        model.lm_head.weight[7] += 2.0**-20
    products.clear()
    run(model, assistant=SamAssistant(), **shown)
    assert not products
    del model
    gc.collect()
    assert COMPACT.nbytes() == 0


def test_memory_is_the_users_to_give(products: list[int]) -> None:
    model, shown = model_of(), {"output_logits": True, "return_dict_in_generate": True}
    need = 2 * TOKENS * HIDDEN
    for limit in (0, need - 1):
        run(model, assistant=SamAssistant(extra_memory=limit), **shown)
    assert not products
    run(model, assistant=SamAssistant(extra_memory=need), **shown)
    assert products
    # The output layer's eight bits count against the limit as well.
    model = model_of()
    run(model, assistant=SamAssistant(extra_memory=need))
    assert COMPACT.nbytes() <= need
