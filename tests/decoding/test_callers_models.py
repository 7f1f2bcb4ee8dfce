"""A model, and settings, that a caller changes between two tokens of a call."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process

from hf_retrieval_assist.engines.cuda import fixed_verifier
from hf_retrieval_assist.host.model_state import ModelWatch
from tests.support.callers import ASKED, START, TEXT, Each, agree
from tests.support.changes import CHANGES
from tests.support.lossless import INPUTS, build, knowing, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import sequences_of
from tests.support.quick import cases, crossed


@pytest.mark.parametrize(
    ("model_class", "inputs"), cases(crossed(["LlamaForCausalLM", "GPT2LMHeadModel"], INPUTS), 2)
)
def test_an_instances_forward_that_takes_anything(model_class, inputs):
    """`generate` hands it no positions, so it computes its own."""
    model = build(model_class)
    own = model.forward
    model.forward = lambda *args, **options: own(*args, **options)
    last = agree(model, dict, inputs=inputs)
    assert last.tier == "chain"
    assert last.accepted > 0


CASES = [
    ("a setting", "criterion", "in place", "one row"),
    ("a hook", "streamer", "that grows", "padded"),
    ("a setting", "criterion", "in place", "padded"),
    *((change, "criterion", "that grows", inputs) for change in CHANGES for inputs in INPUTS),
    *(
        (change, way, "that grows", inputs)
        for change in ("a setting", "a hook")
        for way in ASKED
        for inputs in INPUTS
    ),
]


@pytest.mark.parametrize(("change", "way", "memory", "inputs"), cases(dict.fromkeys(CASES), 2))
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


MOVED = {
    "temperature": (lambda: TemperatureLogitsWarper(1.0), (0.2, 1.2, 2.2)),
    "top_k": (lambda: TopKLogitsWarper(5), (2, 20, 1)),
    "top_p": (lambda: TopPLogitsWarper(0.9), (0.2, 0.9, 0.6)),
    "min_p": (lambda: MinPLogitsWarper(0.1), (0.9, 0.01, 0.3)),
    "filter_value": (lambda: TopKLogitsWarper(5), (-1.0, -2.0, -float("inf"))),
}


@pytest.mark.parametrize(("name", "inputs", "way"), cases(crossed(MOVED, INPUTS, ASKED), 3))
def test_settings_of_warpers_are_read_at_each_token(llama, name, inputs, way):
    make, values = MOVED[name]

    def options():
        warper = make()
        moved = ASKED[way](lambda length: setattr(warper, name, values[length % 3]))
        return {**moved, "logits_processor": [*moved.get("logits_processor", []), warper]}

    last = agree(llama, options, inputs=inputs, do_sample=True, top_k=0)
    assert last.tier == "tree"
    assert last.accepted > 0


def test_settings_of_warpers_are_read_where_the_device_chooses(monkeypatch):
    serve_in_place(monkeypatch)
    model = build()

    def options():
        warper = TemperatureLogitsWarper(1.0)
        act = Each(lambda length: setattr(warper, "temperature", 0.2 + length % 3))
        return {"logits_processor": [warper], "stopping_criteria": [act]}

    for _ in range(3):
        last = agree(model, options, do_sample=True, top_k=0)
    assert last.accepted > 0
    made = fixed_verifier.FixedVerifier  # what chose ahead was there to be wrong
    assert made.summarises


def point_elsewhere(tokens, value):
    tokens.data = torch.full_like(tokens, value)


@pytest.mark.parametrize("write", [torch.Tensor.fill_, point_elsewhere])
def test_suppressed_tokens_that_are_written_in_place_count_at_once(llama, write):
    def options():
        suppress = logits_process.SuppressTokensLogitsProcessor([5, 9])
        tokens = suppress.suppress_tokens
        return {
            "logits_processor": [suppress],
            "stopping_criteria": [Each(lambda length: write(tokens, 3 + length % 40))],
        }

    for sampled in (False, True):
        agree(llama, options, do_sample=sampled, top_k=0)


@pytest.mark.parametrize(
    ("to", "first", "way"), cases(crossed([22, 25, 34, 17], [False, True], ASKED), 3)
)
def test_a_limit_that_is_moved(llama, to, first, way):
    def options():
        limit = MaxLengthCriteria(max_length=30)
        moved = ASKED[way](lambda length: length == 20 and setattr(limit, "max_length", to))
        own = moved.pop("stopping_criteria", [])
        return {**moved, "stopping_criteria": [limit, *own] if first else [*own, limit]}

    agree(llama, options, max_new_tokens=40)


PLACES = ["another tensor", "written in place", "other memory"]


@pytest.mark.parametrize(("place", "inputs"), cases(crossed(PLACES, INPUTS), 3))
def test_an_end_token_that_is_moved(llama, place, inputs):
    text = sequences_of(run(llama, **TEXT))[0]

    def options():
        end = EosTokenCriteria(eos_token_id=66)

        def move(length):
            if length == 20 and place == "another tensor":
                end.eos_token_id = text[25:26].clone()
            elif length == 20 and place == "other memory":
                point_elsewhere(end.eos_token_id, int(text[25]))
            elif length == 20:
                end.eos_token_id.fill_(int(text[25]))

        return {"stopping_criteria": [Each(move), end]}

    agree(llama, options, inputs=inputs)
