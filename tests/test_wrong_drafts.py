"""Drafts from outside, which nothing may believe unread, and fallbacks that do not fit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_retrieval_assist import Assistant, SamAssistant, TokenTree
from hf_retrieval_assist.host import transformers_private as private
from hf_retrieval_assist.types.evidence import EvidenceClasses
from tests.support.eagle_fixtures import tiny_target
from tests.support.heads import block_drafter, eagle_head
from tests.support.lossless import build, run, same
from tests.support.parts import needs
from tests.support.quick import cases, crossed
from tests.support.scripted import Scripted
from tests.support.tiny_models import VOCAB


def fixed(tree):
    return Scripted(lambda budget: tree, name="outsider", evidence=EvidenceClasses())


tree = TokenTree.build
BOTH = np.array([5, 6], np.int32)
WRONG = {
    "log-probabilities": (tree([5, 9], [-1, 0], [-0.7, -1.9]), "probabilities"),
    "large negative": (tree([5, 9], [-1, 0], [-7e6, -9e6]), "probabilities"),
    "NaN and an id beyond the vocabulary": (tree([5, 9999], [-1, -1], [np.nan, 0.5]), "token_ids"),
    "a node more probable than its parent": (tree([5, 9], [-1, 0], [0.2, 0.9]), "parent"),
    "an id beyond the vocabulary": (tree([9999], [-1], [0.9]), "token_ids"),
    "a negative id": (tree([-1], [-1], [0.9]), "token_ids"),
    "a parent behind its child": (tree([5, 6], [1, -1], [0.5, 0.5]), "parents"),
    "a parent that is none": (tree([5, 6], [-1, -70000], [0.5, 0.5]), "parents"),
    "equal siblings": (tree([5, 5], [-1, -1], [0.5, 0.5]), "siblings"),
    "an unknown class": (tree([5], [-1], [0.5], [3]), "classes"),
    "unequal lengths": (replace(tree([5], [-1], [0.5]), token_ids=BOTH), "lengths"),
    "another dtype": (replace(tree([5], [-1], [0.5]), token_ids=np.array([5])), "int32"),
    "lists": (TokenTree([5], [-1], [0.5], [-1]), "arrays"),
    "every other element of an array": (
        replace(tree([5, 6], [-1, 0], [0.5, 0.2]), token_ids=BOTH.repeat(2)[::2]),
        "contiguous",
    ),
}


@pytest.mark.parametrize(("kind", "budget"), cases(crossed(WRONG, [8, "auto"]), 5))
def test_wrong_drafts_are_one_error_that_names_the_drafter(llama, kind, budget):
    wrong, words = WRONG[kind]
    with pytest.raises(ValueError, match="outsider") as raised:
        run(llama, assistant=Assistant([fixed(wrong)], budget=budget))
    assert words in str(raised.value)


@pytest.mark.parametrize("budget", [8, "auto"])
def test_nodes_of_no_probability_are_dropped_with_what_is_below_them(llama, budget):
    nan = float("nan")
    mixed = tree([5, 6, 9, 7], [-1, -1, 0, 1], [nan, 0.4, 0.3, 0.1])
    kept = mixed.without_nan()
    assert kept.token_ids.tolist() == [6, 7]
    assert kept.parents.tolist() == [-1, 0]
    assert kept.without_nan() is kept
    for draft in (mixed, tree([5], [-1], [nan])):
        _, _, assistant = same(llama, assistant=Assistant([fixed(draft)], budget=budget))
        if draft is not mixed:
            assert not assistant.stats.last.drafted
        elif budget != "auto":
            assert assistant.stats.last.drafted


@pytest.fixture
def nothing_is_generated(monkeypatch):
    monkeypatch.setattr(private, "prefill", lambda *_, **__: pytest.fail("generation began"))


def head_for(**shape):
    """A head made for another target than the tests' own."""
    return eagle_head(tiny_target(**shape))


MISFITS = {
    "no MTP layers": (lambda: "mtp", r"fallback 'mtp': .*num_mtp_layers.*LlamaForCausalLM"),
    "no EAGLE boundaries": (
        lambda: head_for(hidden_size=32, vocab_size=VOCAB),
        "boundaries: expected -1 or 0 to 2 for a model of 3 blocks",
    ),
    "EAGLE head of more ids": (
        lambda: head_for(hidden_size=32, vocab_size=VOCAB + 1, num_layers=3),
        f"expected ids below the vocabulary size {VOCAB}, got {VOCAB}",
    ),
    "EAGLE head of another width": (
        lambda: head_for(hidden_size=32, vocab_size=VOCAB, num_layers=3),
        "EAGLE head: expected one for the target's hidden size of 64, got one for 32",
    ),
    "DFlash model of more ids": (
        lambda: block_drafter(mask_token_id=VOCAB),
        f"below the target's {VOCAB} ids, got {VOCAB}",
    ),
    "draft model of another tokenizer": (
        lambda: build(vocab_size=VOCAB + 2000),
        f"draft_model: expected the target's vocabulary of {VOCAB} ids",
    ),
    "draft model without a cache": (
        lambda: build("RwkvForCausalLM"),
        "token trees, got RwkvForCausalLM",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.usefixtures("nothing_is_generated")
def test_a_fallback_that_does_not_fit_is_named_before_the_prompt_is_processed(llama, name):
    make, message = MISFITS[name]
    for fallback in (make(), ["logit_ngrams", make()]):
        with pytest.raises(ValueError, match=message):
            run(llama, assistant=SamAssistant(fallback=fallback))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Qwen3NextForCausalLM", "recurrent state"),
        ("Lfm2ForCausalLM", "convolution state"),
        ("BloomForCausalLM", "no position_ids"),
        ("T5ForConditionalGeneration", "encoder-decoder"),
    ],
)
@needs("engines/cpu")
@pytest.mark.usefixtures("nothing_is_generated")
def test_models_that_take_no_trees(name, match):
    with pytest.raises(ValueError, match=match):
        run(build(name), assistant=SamAssistant(fallback="quantized_self"))


@needs("engines/cpu", "extensions/heads")
def test_what_is_no_fallback():
    expected = r".*'mtp', 'quantized_self', .* EagleHead.from_pretrained\(folder, model\).*"
    with pytest.raises(ValueError, match=f"^fallback: expected {expected}, got 'eagle'"):
        SamAssistant(fallback="eagle")
    with pytest.raises(ValueError, match=r"papers.TokenRecycling\(\)"):
        SamAssistant(fallback="token_recycling")
    with pytest.raises(TypeError, match=r"fallback: expected .* got Linear"):
        SamAssistant(fallback=torch.nn.Linear(2, 2))
