"""What tells models apart, and what does not."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_retrieval_assist.host.fingerprint import _SAMPLED, _sample, fingerprint
from tests.support.lossless import build, same
from tests.support.wrapped_models import with_lora


def changed(model, **settings):
    other = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(other.config, name, value)
    return other


@pytest.fixture
def adapted():
    """A model with adapters "a" and "b", "a" in use."""
    return with_lora(build(), "a", "b")


@pytest.mark.parametrize(
    "settings",
    [{"transformers_version": "6.0.0"}, {"dtype": "bfloat16"}, {"output_hidden_states": True}],
)
def test_passing_settings_leave_a_model_itself(model, settings):
    other = changed(model, **settings)
    other.set_attn_implementation("eager")
    assert fingerprint(other.to(torch.bfloat16)) == fingerprint(model)


def test_a_copy_in_another_folder_is_the_same_model(model, tmp_path):
    found = set()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name)
        found.add(fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / name)))
    assert found == {fingerprint(model)}


def test_other_sizes_and_other_weights_are_told_apart(model):
    assert fingerprint(changed(model, num_hidden_layers=7)) != fingerprint(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[-1].mlp.up_proj.weight.mul_(1.1)
    found = fingerprint(other)
    assert found != fingerprint(model)
    # In training it keeps what it has learnt.
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    assert fingerprint(other) == found


def test_adapters_are_told_apart_and_others_beside_them_do_not_matter(adapted):
    base, found = adapted.get_base_model(), {}
    for name in ("a", "b"):
        adapted.set_adapter(name)
        found[name] = fingerprint(base)
    with adapted.disable_adapter():
        found["none"] = fingerprint(base)
    assert len(set(found.values())) == 3
    adapted.delete_adapter("b")
    adapted.set_adapter("a")
    alone = copy.deepcopy(adapted).get_base_model()
    assert fingerprint(alone) == found["a"]
    with torch.no_grad():
        alone.model.layers[0].self_attn.q_proj.lora_A["a"].weight.add_(1)
    assert fingerprint(copy.deepcopy(alone)) != found["a"]


def test_a_parameter_of_more_elements_than_single_precision_counts():
    """The embedding matrix of a vocabulary of 262,144 ids has so many."""
    assert _sample(torch.zeros(1).expand(262_144 * 640)) == bytes(4 * _SAMPLED)


@pytest.mark.parametrize(
    "settings",
    [{"trainable_token_indices": [5]}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}],
    ids=["tokens", "saved modules", "magnitudes"],
)
def test_adapters_of_every_part(settings):
    wrapped = with_lora(build(), task_type="CAUSAL_LM", **settings)
    base = wrapped.get_base_model()
    same(wrapped, tier="tree")
    with wrapped.disable_adapter():
        plain = fingerprint(base)
    assert plain != fingerprint(base)
