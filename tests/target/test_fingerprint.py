"""What tells models apart, and what does not."""

import copy

import pytest
from transformers import LlamaForCausalLM

from hf_retrieval_assist.target.fingerprint import fingerprint
from tests.lossless import build


def changed(model, **settings):
    other = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(other.config, name, value)
    return other


@pytest.fixture(scope="module")
def model():
    return build(LlamaForCausalLM)


@pytest.mark.parametrize(
    "settings",
    [{"transformers_version": "6.0.0"}, {"dtype": "bfloat16"}, {"output_hidden_states": True}],
)
def test_passing_settings_leave_a_model_itself(model, settings):
    assert fingerprint(changed(model, **settings)) == fingerprint(model)


def test_attention_implementations_share_what_was_learnt(model):
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    assert fingerprint(other) == fingerprint(model)


@pytest.mark.parametrize("settings", [{"_name_or_path": "tuned"}, {"num_hidden_layers": 7}])
def test_other_models_are_told_apart(model, settings):
    assert fingerprint(changed(model, **settings)) != fingerprint(model)
