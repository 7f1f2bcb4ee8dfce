"""A model that a caller changes between two tokens of a call."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from transformers import StoppingCriteria

from hf_retrieval_assist.host.model_state import ModelWatch
from tests.support.callers import ASKED, START, TEXT, Each, agree
from tests.support.changes import CHANGES
from tests.support.lossless import INPUTS, build, knowing, run
from tests.support.op_recorder import serve_in_place


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_an_instances_forward_that_takes_anything(model_class, inputs):
    """`generate` hands it no positions, so it computes its own."""
    model = build(model_class)
    own = model.forward
    model.forward = lambda *args, **options: own(*args, **options)
    last = agree(model, dict, inputs=inputs)
    assert last.tier == "chain"
    assert last.accepted > 0


CASES = [
    *((change, "criterion", "that grows") for change in CHANGES),
    *((change, way, "that grows") for change in ("a setting", "a hook") for way in ASKED),
    ("a setting", "criterion", "in place"),
]


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(("change", "way", "memory"), dict.fromkeys(CASES))
def test_a_model_that_is_changed_within_a_call(change, way, memory, inputs, monkeypatch):
    if memory == "in place":
        serve_in_place(monkeypatch)
    model, scope = build(), ExitStack()

    def options():
        def act(length):
            if length == START + 8:
                scope.enter_context(CHANGES[change](model))
            elif length == START + 17:
                scope.close()

        return ASKED[way](act)

    known = knowing(*(model.generate(**INPUTS[inputs], **TEXT, **options())).split(1))
    for assistant in (None, known, known, known):  # trees, then forwards that are repeated
        last = agree(model, options, inputs=inputs, assistant=assistant)
        assert last.tier == "tree"
        assert last.accepted > 0 or inputs == "padded"
        assert "changed the model" in last.reason


def test_what_nothing_counts_can_be_said():
    model = build()
    weight = model.model.layers[0].mlp.down_proj.weight
    assistant = knowing(run(model, **TEXT), budget=6)

    def options():
        def act(length):
            if length in (START + 8, START + 17):
                weight.data.mul_(3.0 if length == START + 8 else 1 / 3.0)
                assistant.model_changed()

        return {"stopping_criteria": [Each(act)]}

    for _ in range(3):
        last = agree(model, options, assistant=assistant)
    assert "changed the model" in last.reason


def test_a_call_without_code_of_the_callers_is_not_compared(llama, monkeypatch):
    monkeypatch.setattr(ModelWatch, "__init__", lambda *_: pytest.fail("compared"))
    assert agree(llama, dict, do_sample=True, temperature=0.7).accepted > 0


def test_ids_that_a_callers_code_writes_into_are_the_text_from_there_on(llama):
    def options():
        def process(ids, scores):
            if ids.shape[1] == START + 6:
                ids[:, 2] = 11
            return scores + F.one_hot((ids[:, 2] + ids[:, -1]) % 67, 67) * 0.5

        class Rewrites(StoppingCriteria):
            def __call__(self, ids, scores, **options):
                if ids.shape[1] == START + 10:
                    ids[:, -1] = 12
                return torch.zeros(len(ids), dtype=torch.bool)

        return {"logits_processor": [process], "stopping_criteria": [Rewrites()]}

    for inputs in INPUTS:
        for sampled in (False, True):
            agree(llama, options, inputs=inputs, do_sample=sampled, top_k=0)
