"""Texts that calls leave, and with which later ones begin: the same tokens, read once."""

from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import transformers

from hf_retrieval_assist import OutputMemory, Prefixes, SamAssistant, release_memory
from hf_retrieval_assist.decoding.prompt_parts import prompts_in_parts
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.callers import Shows
from tests.support.lossless import build, rope_model
from tests.support.op_recorder import serve_in_place
from tests.support.quick import cases
from tests.support.threads import in_threads
from tests.support.watching import fed_shapes
from tests.support.wrapped_models import with_lora

# No window, windows that texts pass, and layers that share another's keys and values.
KINDS = ["LlamaForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM", "Qwen2ForCausalLM"]


def ids_of(length, seed=0):
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, assistant=None, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, **options, assistant=assistant)


def has_windows(model):
    return "sliding_attention" in (getattr(model.config, "layer_types", None) or ())


def turns(model, assistant, count=4, begin=None, **options):
    """A conversation whose whole history is sent with every turn: what was read before, by turn."""
    text, read = ids_of(30) if begin is None else begin, []
    for turn in range(count):
        plain = generate(model, text, **options)
        ours = generate(model, text, assistant, **options)
        assert torch.equal(plain, ours)
        read.append(assistant.stats.last.read_before)
        text = torch.cat([plain, ids_of(7, seed=1 + turn)], dim=1)
    return text, read


@pytest.fixture(scope="module", params=cases(KINDS, 3))
def model(request):
    return build(request.param, eos_token_id=None)


@pytest.mark.parametrize(
    ("served", "budget", "do_sample"),
    [("whole", 0, True), ("whole", 6, False), ("in parts", 4, False), ("in place", 6, True)],
)
def test_a_conversation_is_read_once(model, served, budget, do_sample, monkeypatch):
    if served == "in place":
        serve_in_place(monkeypatch)
    assistant = SamAssistant(prefixes=Prefixes(), budget=budget)
    with prompts_in_parts(16, lambda: None) if served == "in parts" else nullcontext():
        _, read = turns(model, assistant, do_sample=do_sample)
    # All but the last token of each answer, which no forward was fed.
    assert read == [0, 41, 60, 79]
    assert "79 tokens of the prompt were read before" in str(assistant.stats.last)


def test_only_the_rest_is_fed(model):
    assistant = SamAssistant(prefixes=Prefixes(), fallback=None)
    text, _ = turns(model, assistant, 2)
    with fed_shapes(model) as shapes:
        generate(model, text, assistant, max_new_tokens=1)
    assert shapes == [(1, text.shape[1] - 60)]
    # The whole prompt once more: its last token is read, and what windows have to see again.
    with fed_shapes(model) as shapes:
        generate(model, text, assistant, max_new_tokens=1)
    assert shapes == [(1, text.shape[1] - 60 if has_windows(model) else 1)]


def test_histories_that_are_edited(model):
    """Cut in the middle, or another from there on; layers with windows have dropped what stood
    there, if the text has passed them."""
    assistant = SamAssistant(prefixes=Prefixes(), budget=4)
    text, _ = turns(model, assistant, 3)
    for kept in (50, 20, 8):
        edited = torch.cat([text[:, :kept], ids_of(9, seed=kept)], dim=1)
        assert torch.equal(generate(model, edited), generate(model, edited, assistant))
        expected = 0 if kept < 16 else kept
        assert assistant.stats.last.read_before == expected or has_windows(model)


def test_threads(model):
    assistant = SamAssistant(prefixes=Prefixes())
    in_threads(lambda seed: turns(model, assistant, 3, ids_of(20, seed)), (1, 1, 2))


def test_a_model_that_has_changed_is_read_anew():
    model = with_lora(build(), target_modules=["q_proj", "k_proj"])
    assistant = SamAssistant(prefixes=Prefixes(), budget=4)
    text, _ = turns(model, assistant, 2)
    with model.disable_adapter():
        assert torch.equal(generate(model, text), generate(model, text, assistant))
        assert assistant.stats.last.read_before == 0
    assert torch.equal(generate(model, text), generate(model, text, assistant))
    assert assistant.stats.last.read_before > 0
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_A" in n).mul_(3)
    assert torch.equal(generate(model, text), generate(model, text, assistant))
    assert assistant.stats.last.read_before == 0


def interrupt(model, assistant):
    raise KeyboardInterrupt


def change_weights(model, assistant):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def say_so(model, assistant):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)
    assistant.model_changed()


MEANWHILE = {
    "weights": change_weights,
    "a change that is said": say_so,
    "a setting": lambda model, _: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "its tenant is erased": lambda _, assistant: setattr(assistant.policy, "teaches", False),
    "an interruption": interrupt,
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_a_call_in_which_something_changes_leaves_nothing(what):
    """Its keys and values are of two models, nobody's, or not of a whole text."""
    model, prefixes, text = build(), Prefixes(), ids_of(30)
    assistant = SamAssistant(prefixes=prefixes.namespace("acme"), budget=2)

    def act(length):
        if length == text.shape[1] + 4:
            MEANWHILE[what](model, assistant)

    with suppress(KeyboardInterrupt):
        generate(model, text, assistant, streamer=Shows(act))
    assert len(prefixes) == 0
    assert torch.equal(generate(model, text), generate(model, text, assistant))
    assert assistant.stats.last.read_before == 0


def test_what_takes_and_keeps_nothing():
    model, prefixes = build(), Prefixes()
    assistant = SamAssistant(prefixes=prefixes)
    text, _ = turns(model, assistant, 2)
    known = len(prefixes)
    generate(model, text, assistant.private())
    assert (assistant.stats.last.read_before, len(prefixes)) == (0, known)
    # Rows of a batch, padding, embeddings, and a cache of the caller's.
    batch = text.repeat(2, 1)
    generate(model, batch, assistant)
    assert assistant.stats.last.read_before == 0
    mask = torch.ones_like(text)
    mask[:, :2] = 0
    model.generate(text, attention_mask=mask, max_new_tokens=3, assistant=assistant)
    assert assistant.stats.last.read_before == 0
    embeds = model.get_input_embeddings()(text).detach()
    model.generate(inputs_embeds=embeds, max_new_tokens=3, assistant=assistant)
    assert assistant.stats.last.read_before == 0
    assert len(prefixes) == known
    # A returned cache is its caller's, whoever goes on from it.
    returned = generate(model, text, assistant, return_dict_in_generate=True)
    assert assistant.stats.last.read_before > 0
    assert len(prefixes) == known
    returned[CACHE].layers[0].keys.zero_()
    assert torch.equal(generate(model, text), generate(model, text, assistant))


def test_other_tenants_find_nothing():
    model, prefixes = build(), Prefixes()
    acme, globex = (SamAssistant(prefixes=prefixes.namespace(name)) for name in ("acme", "globex"))
    text, _ = turns(model, acme, 2)
    generate(model, text, globex)
    assert globex.stats.last.read_before == 0
    assert prefixes.namespace("acme").forget() == 1
    generate(model, text, acme)
    assert acme.stats.last.read_before == 0
    assert prefixes.forget() == 2
    assert prefixes.nbytes == 0


def test_the_bound_holds():
    model = build()
    assistant = SamAssistant(prefixes=Prefixes())
    turns(model, assistant, 1)
    small = Prefixes(3 * assistant.policy.prefixes.nbytes)
    assistant, texts = SamAssistant(prefixes=small), [ids_of(30, seed) for seed in range(6)]
    for text in texts:
        generate(model, text, assistant)
        assert small.nbytes <= small.max_bytes
    assert len(small) == 3
    for text, read in ((texts[5], 29), (texts[0], 0)):
        generate(model, text, assistant)
        assert assistant.stats.last.read_before == read
    release_memory(model)
    assert len(small) == 0
    tiny = SamAssistant(prefixes=Prefixes(1))
    turns(model, tiny, 2)
    assert len(tiny.policy.prefixes) == 0


UNKEPT = {
    "Qwen3NextForCausalLM": "more than keys and values",
    "DoryForCausalLM": "",  # its forwards append a layer to the cache
    "MoshiForCausalLM": "what their windows have passed",
}


@pytest.mark.parametrize("kind", [name for name in UNKEPT if hasattr(transformers, name)])
def test_texts_that_cannot_be_gone_on_from_are_not_kept(kind):
    model = build(kind, eos_token_id=None)
    assistant = SamAssistant(prefixes=Prefixes(), memory=OutputMemory())
    _, read = turns(model, assistant, 2)
    assert read == [0, 0]
    assert UNKEPT[kind] in str(assistant.stats.last)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_texts_whose_frequencies_change(kind):
    """Reused up to the length at which they do, and not behind it. Models are new in each call:
    dynamic frequencies depend on the calls before."""
    model, assistant = rope_model(kind, 70), SamAssistant(prefixes=Prefixes(), budget=6)
    generate(model, ids_of(5), assistant)  # makes the longer frequencies
    text = ids_of(30)
    for turn, read in enumerate((0, 41, 0)):
        options = {"max_new_tokens": 12 if turn < 1 else 30, "eos_token_id": None}
        plain = generate(rope_model(kind, 70), text, **options)
        assert torch.equal(generate(model, text, assistant, **options), plain)
        assert assistant.stats.last.read_before == read
        text = torch.cat([plain, ids_of(7, seed=1 + turn)], dim=1)
    assert "frequencies follow the length" in str(assistant.stats.last)


def test_models_of_images_that_are_given_none():
    """Their inputs of images are empty, and their tokens are all of text."""
    model = build("Gemma3ForConditionalGeneration", eos_token_id=None)
    assistant = SamAssistant(prefixes=Prefixes(), budget=6)
    text, read = turns(model, assistant, 2)
    assert read == [0, 41]
    assert torch.equal(
        generate(model, text, token_type_ids=torch.zeros_like(text)),
        generate(model, text, assistant, token_type_ids=torch.zeros_like(text)),
    )
    assert assistant.stats.last.read_before == 60
    generate(model, text, assistant, token_type_ids=torch.ones_like(text))
    assert "no text is kept: its forward is given token_type_ids" in str(assistant.stats.last)


def test_bad_arguments():
    with pytest.raises(TypeError, match="expected a number of bytes, got str"):
        Prefixes("2G")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Prefixes(0)
    with pytest.raises(TypeError, match="prefixes: expected Prefixes, got int"):
        SamAssistant(prefixes=1 << 30)
    assert Prefixes().find(object(), None, np.arange(40)) == (0, None)
