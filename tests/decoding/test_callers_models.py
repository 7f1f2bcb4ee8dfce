"""What a caller changes between two tokens of a call: settings, and a model where that is said."""

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
from tests.support.callers import ASKED, START, TEXT, Each, agree
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


def test_a_change_within_a_call_that_is_said_counts_from_there_on():
    model = build()
    attention = model.model.layers[0].self_attn
    assistant = knowing(run(model, **TEXT), budget=6)

    def options():
        def act(length):
            if length in (START + 8, START + 17):
                attention.scaling *= 3.0 if length == START + 8 else 1 / 3.0
                assistant.model_changed()

        return {"stopping_criteria": [Each(act)]}

    for _ in range(4):  # trees, then forwards that are repeated
        assert agree(model, options, assistant=assistant).tier == "tree"


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
    # What moves them may follow all rows of a batch.
    assert last.tier == ("tree" if len(INPUTS[inputs]["input_ids"]) == 1 else "plain")
    assert (last.accepted > 0) == (last.tier == "tree")


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
