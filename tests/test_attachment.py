"""An assistant attached to a model serves the calls of `generate` that others make."""

import copy
import gc
import pickle

import pytest
import torch
from transformers import BertConfig, BertModel, GenerationConfig

from hf_retrieval_assist import SamAssistant, attach, detach
from hf_retrieval_assist.attachment import _attachments, attached_to
from tests.support.memories import remembering

from .support.lossless import build, knowing, outcome, run
from .support.wrapped_models import with_lora


@pytest.fixture
def model():
    """A model of its own for every test, since attaching lasts."""
    return build()


def calls(assistant):
    return assistant.stats.total.calls


def test_the_last_one_attached_serves_until_it_is_detached(model, told):
    plain = run(model)
    assistants = first, second, own = [knowing(plain) for _ in range(3)]

    def served(**options):
        assert torch.equal(plain, run(model, **options))
        return [calls(assistant) for assistant in assistants]

    attach(model, first)
    attach(model, first)
    assert served() == [1, 0, 0]
    assert first.stats.last.accepted > 0
    assert "replaced" not in told.text
    attach(model, second)
    assert "another assistant was attached and is replaced" in told.text
    assert served() == [1, 1, 0]
    # What a call says of its own wins.
    assert served(assistant=own) == served(assistant=None) == [1, 1, 1]
    # Scopes nest, and end with exceptions.
    with first.attached(model) as found:
        assert found is first
        with pytest.raises(ValueError, match="no_such_argument"), own.attached(model):
            run(model, no_such_argument=1)
        assert served() == [2, 1, 1]
    detach(model)
    detach(model)
    assert served() == [2, 1, 1]


def test_nothing_is_stored_on_the_model(model, tmp_path):
    before, state = set(vars(model)), set(model.state_dict())
    with SamAssistant().attached(model):
        assert set(vars(model)) == before
        assert set(model.state_dict()) == state
        assert attached_to(copy.deepcopy(model)) is None
        assert attached_to(pickle.loads(pickle.dumps(model))) is None
        model.save_pretrained(tmp_path)
    assert torch.equal(run(type(model).from_pretrained(tmp_path)), run(model))


def test_models_are_not_kept_alive():
    gc.collect()
    known = len(_attachments)
    model = build()
    assistant = SamAssistant()
    attach(model, assistant)
    run(model)
    assert len(_attachments) == known + 1
    del model
    gc.collect()
    assert len(_attachments) == known


WRAPPERS = {
    "adapted": with_lora,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": torch.nn.DataParallel,
    "module": lambda model: torch.nn.ModuleDict({"head": torch.nn.Linear(1, 1), "policy": model}),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_models_are_found_in_their_wrappers(model, wrap):
    wrapper = WRAPPERS[wrap](model)
    with SamAssistant().attached(wrapper) as assistant:
        run(model)
        assert calls(assistant) == 1
        if wrap in ("compiled", "adapted"):
            run(wrapper)
            assert calls(assistant) == 2


NOT_OURS = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "stop_strings": {"stop_strings": "x"},
    "token_healing": {"token_healing": True},
    "cache_implementation": {"cache_implementation": "quantized"},
    "custom_generate": {"custom_generate": lambda model, input_ids, **kwargs: input_ids},
}


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("name", NOT_OURS)
def test_calls_that_cannot_be_assisted_decode_plainly(model, name, by_model, told, monkeypatch):
    options = NOT_OURS[name]
    if by_model and name not in ("custom_generate", "prompt_lookup_num_tokens"):
        for option, value in options.items():
            monkeypatch.setattr(model.generation_config, option, value)
        options = {}

    def call():
        return run(model, **options).tolist()

    plain = outcome(call)
    with SamAssistant().attached(model) as assistant:
        assert outcome(call) == outcome(call) == plain
    if isinstance(plain, list):
        assert (calls(assistant), assistant.stats.last.tier) == (2, "plain")
        assert name in assistant.stats.last.reason
    shown = [r for r in told.records if r.name == "transformers.hf_retrieval_assist.hook"]
    assert len(shown) == 1
    assert name in shown[0].getMessage()


def test_texts_expected_row_by_row_are_refused_for_batches_of_others():
    model = build()
    with pytest.raises(ValueError, match=r"^assistant: expected texts for all rows .* got 2 rows"):
        attach(model, SamAssistant().expecting(rows=[[[1]], [[2]]]))
    assert attached_to(model) is None
    attach(model, SamAssistant().expecting([1]))
    detach(model)


HEADLESS = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)


@pytest.mark.parametrize("other", [None, "gpt2", torch.nn.Linear(1, 1), BertModel(HEADLESS)])
def test_refuses_what_does_not_generate(other):
    with pytest.raises(TypeError, match=r"^model: expected a transformers model that can generate"):
        attach(other, SamAssistant())


def test_copies_of_arguments_hold_the_same_assistant():
    assistant = SamAssistant()
    assert copy.deepcopy({"assistant": assistant})["assistant"] is assistant
    config = GenerationConfig(max_new_tokens=3)
    config.assistant = assistant
    assert copy.deepcopy(config).assistant is assistant


def test_pickling_says_what_cannot_travel():
    with pytest.raises(TypeError, match=r"^SamAssistant: .* OutputMemory\(path="):
        pickle.dumps(remembering())
