"""Options as data: what signatures name, what `repr` shows, and what JSON keeps."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_retrieval_assist import (
    OutputMemory,
    RestAssistant,
    RolloutAssistant,
    SamAssistant,
    SequoiaAssistant,
    SuffixAssistant,
)
from hf_retrieval_assist.options import (
    Options,
    RestOptions,
    RolloutOptions,
    SamOptions,
    SequoiaOptions,
    SuffixOptions,
)

from .support.lossless import build

KINDS = {
    SamAssistant: SamOptions,
    SuffixAssistant: SuffixOptions,
    RolloutAssistant: RolloutOptions,
    RestAssistant: RestOptions,
    SequoiaAssistant: SequoiaOptions,
}
RESOURCES = {"corpus", "memory", "datastore", "draft_model", "costs", "tokenizer"}


@pytest.mark.parametrize("preset", KINDS)
def test_the_signature_names_every_option_with_its_default(preset: type) -> None:
    parameters = inspect.signature(preset).parameters
    named = {
        name: parameter.default for name, parameter in parameters.items() if name not in RESOURCES
    }
    fields = dataclasses.fields(KINDS[preset])
    assert named == {field.name: field.default for field in fields}


@pytest.mark.parametrize(
    ("preset", "given"),
    [
        (SamAssistant, {}),
        (SamAssistant, {"budget": "paper", "min_match": 3, "fallback": None}),
        (SamAssistant, {"budget": 8, "fallback": ["mtp", "token_recycling"], "reroute": False}),
        (SuffixAssistant, {"alpha": 2.0, "tree": False, "max_nodes": 32}),
        (RolloutAssistant, {"half_life": 4.0}),
    ],
)
def test_options_are_kept_as_json(preset: Any, given: dict[str, Any]) -> None:
    assistant = preset(**given)
    options = type(assistant.options).from_json(assistant.options.to_json())
    assert options == assistant.options
    again = preset.of(options)
    assert again.options == options
    assert repr(again) == repr(assistant)
    assert [type(one) for one in again.drafters] == [type(one) for one in assistant.drafters]


def test_an_assistant_shows_what_it_was_told() -> None:
    assert repr(SamAssistant()) == "SamAssistant()"
    shown = repr(SamAssistant(budget="paper", min_match=3, fallback=None))
    assert shown == "SamAssistant(budget='paper', fallback=None, min_match=3)"
    draft = build(LlamaForCausalLM)
    assert repr(SamAssistant(fallback=[draft])) == "SamAssistant(fallback=[<LlamaForCausalLM>])"


def test_what_json_cannot_hold_is_named() -> None:
    options = SamAssistant(fallback=build(LlamaForCausalLM)).options
    with pytest.raises(ValueError, match="fallback: expected what JSON can hold, got <Llama"):
        options.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a JSON object"),
        ('{"min_macth": 3}', "got 'min_macth'"),
        ('{"threshold": 3}', "got 'threshold'"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamOptions.from_json(text)


def test_resources_go_beside_the_options() -> None:
    memory = OutputMemory()
    assistant = SuffixAssistant.of(SuffixOptions(budget=4), memory=memory)
    assert assistant.memory is memory
    assert isinstance(assistant.options, Options)
