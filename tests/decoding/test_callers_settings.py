"""Settings that a caller moves within a call count where plain decoding meets them."""

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process

from hf_retrieval_assist.engines.cuda import fixed_verifier
from tests.support.callers import ASKED, TEXT, Each, agree
from tests.support.lossless import INPUTS, build, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import sequences_of


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda: TemperatureLogitsWarper(1.0), "temperature", (0.2, 1.2, 2.2)),
        (lambda: TopKLogitsWarper(5), "top_k", (2, 20, 1)),
        (lambda: TopPLogitsWarper(0.9), "top_p", (0.2, 0.9, 0.6)),
        (lambda: MinPLogitsWarper(0.1), "min_p", (0.9, 0.01, 0.3)),
        (lambda: TopKLogitsWarper(5), "filter_value", (-1.0, -2.0, -float("inf"))),
    ],
)
def test_settings_of_warpers_are_read_at_each_token(llama, make, name, values, inputs, way):
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


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("to", [22, 25, 34, 17])
def test_a_limit_that_is_moved(llama, to, first, way):
    def options():
        limit = MaxLengthCriteria(max_length=30)
        moved = ASKED[way](lambda length: length == 20 and setattr(limit, "max_length", to))
        own = moved.pop("stopping_criteria", [])
        return {**moved, "stopping_criteria": [limit, *own] if first else [*own, limit]}

    agree(llama, options, max_new_tokens=40)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("place", ["another tensor", "written in place", "other memory"])
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
