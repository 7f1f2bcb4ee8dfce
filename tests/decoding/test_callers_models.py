"""What a caller changes between two tokens of a call: settings, and a model where that is said."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_retrieval_assist.engines.cuda import fixed_verifier
from tests.support.callers import ASKED, START, TEXT, Each, agree
from tests.support.lossless import INPUTS, build, knowing, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import sequences_of
from tests.support.quick import cases, crossed


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


def point_elsewhere(tokens, value):
    tokens.data = torch.full_like(tokens, value)


def going_through(name, *values):
    return lambda own, length, _: setattr(own, name, values[length % len(values)])


def at_20(change):
    return lambda own, length, text: length == 20 and change(own, int(text[25]))


suppressing = partial(SuppressTokensLogitsProcessor, [5, 9])
an_end = partial(EosTokenCriteria, eos_token_id=66)


# What a call is given, and what changes that: given it, the length, and how the text goes on.
CHANGED = {
    "temperature": (
        partial(TemperatureLogitsWarper, 1.0),
        going_through("temperature", 0.2, 1.2, 2.2),
    ),
    "a limit, later": (
        partial(MaxLengthCriteria, 30),
        at_20(lambda own, _: setattr(own, "max_length", 34)),
    ),
    "an end token": (an_end, at_20(lambda own, token: own.eos_token_id.fill_(token))),
    "tokens": (suppressing, lambda own, n, _: own.suppress_tokens.fill_(3 + n % 40)),
    "top_k": (partial(TopKLogitsWarper, 5), going_through("top_k", 2, 20, 1)),
    "top_p": (partial(TopPLogitsWarper, 0.9), going_through("top_p", 0.2, 0.9, 0.6)),
    "min_p": (partial(MinPLogitsWarper, 0.1), going_through("min_p", 0.9, 0.01, 0.3)),
    "filter_value": (
        partial(TopKLogitsWarper, 5),
        going_through("filter_value", -1.0, -2.0, -torch.inf),
    ),
    "a limit, sooner": (
        partial(MaxLengthCriteria, 30),
        at_20(lambda own, _: setattr(own, "max_length", 22)),
    ),
    "a limit, at once": (
        partial(MaxLengthCriteria, 30),
        at_20(lambda own, _: setattr(own, "max_length", 17)),
    ),
    "another end": (
        an_end,
        at_20(lambda own, token: setattr(own, "eos_token_id", torch.tensor([token]))),
    ),
    "an end's memory": (an_end, at_20(lambda own, n: point_elsewhere(own.eos_token_id, n))),
    "tokens' memory": (
        suppressing,
        lambda own, n, _: point_elsewhere(own.suppress_tokens, 3 + n % 40),
    ),
}


@pytest.mark.parametrize(
    ("kind", "inputs", "way", "before"), cases(crossed(CHANGED, INPUTS, ASKED, [True, False]), 6)
)
def test_what_is_changed_within_a_call_counts_from_there_on(llama, kind, inputs, way, before):
    text, (make, change) = sequences_of(run(llama, **TEXT))[0], CHANGED[kind]

    def options():
        own = make()
        name = "stopping_criteria" if isinstance(own, StoppingCriteria) else "logits_processor"
        given = ASKED[way](lambda length: change(own, length, text))
        others = given.get(name, [])
        return given | {name: [*others, own] if before else [own, *others]}

    for sampled in (True, False):
        last = agree(llama, options, inputs=inputs, do_sample=sampled, top_k=0, max_new_tokens=26)
        # What changes it may follow all rows of a batch.
        assert last.tier == ("tree" if len(INPUTS[inputs]["input_ids"]) == 1 else "plain")


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
