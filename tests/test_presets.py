"""The assistant inside `generate`: lossless, and with the parts it is made of."""

import inspect
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import hf_retrieval_assist
from hf_retrieval_assist import Assistant, Datastore, OutputMemory, QuantizedSelf, SamAssistant
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.draft_models.fallbacks import fallback_drafters
from hf_retrieval_assist.drafters.automaton import StaticAutomatonDrafter
from hf_retrieval_assist.drafters.logit_ngrams import LogitNgramDrafter
from hf_retrieval_assist.drafters.rest import RestDrafter
from hf_retrieval_assist.drafters.suffix import SuffixDrafter
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter
from hf_retrieval_assist.host.fingerprint import fingerprint
from hf_retrieval_assist.papers import SamDecoding, SuffixDecoding
from hf_retrieval_assist.policy.planner import Planner
from tests.support.memories import check_memory, remembering, rollouts
from tests.support.parts import needs
from tests.support.quick import cases

from .support.fixed_costs import FixedCosts
from .support.heads import eagle_head
from .support.lossless import NEW_TOKENS, PHRASE, PROMPT, SAMPLING, build, disturbed, run, same
from .support.tiny_models import VOCAB

SLOW_STEPS = FixedCosts(lambda tokens: 1.0)  # any drafting takes no time beside these


def check_lossless(model, assistant, ids=PROMPT):
    """Greedy, sampled and in a batch; the figures of the greedy call."""
    same(model, ids, assistant)
    greedy = assistant.stats.last
    same(model, ids, assistant, **SAMPLING)
    same(model, torch.cat([ids, ids.flip(1)]), assistant)
    return greedy


@pytest.mark.parametrize("preset", [SamAssistant, remembering, rollouts])
def test_defaults_draft_a_text_that_repeats_itself(llama, preset):
    assistant = preset(costs=SLOW_STEPS)
    text = {"prefix_allowed_tokens_fn": lambda row, ids: [PHRASE[len(ids) % len(PHRASE)]]}
    same(llama, assistant=assistant, calls=3, max_new_tokens=60, **text)
    assert assistant.stats.total.accepted > 20


@pytest.mark.slow
def test_the_default_draws_trees_of_a_draft_model_that_costs_little():
    """A draft model of one layer; the target's others add nothing."""
    draft = build(num_hidden_layers=1)
    target = build(num_hidden_layers=24)
    target.load_state_dict(draft.state_dict(), strict=False)
    for layer in target.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    assistant = SamAssistant(fallback=draft, costs=SLOW_STEPS)
    same(target, assistant=assistant, calls=3, max_new_tokens=60)
    assert assistant.stats.total.accepted > 20


# Those of the model, of documents of what it generates, of these on disk, and of a draft model.
KINDS = {
    "sam": lambda made, **options: SamAssistant(**options),
    "sam alone": lambda made, **options: SamAssistant(fallback=None, **options),
    "sam with a memory": lambda made, **options: SamAssistant(memory=OutputMemory(), **options),
    "sam without kernels": lambda made, **options: SamAssistant(reroute=False, **options),
    "sam with a corpus": lambda made, **options: SamAssistant(made.texts, **options),
    "sam with a datastore": lambda made, **options: SamAssistant(made.store, **options),
    "rollouts": lambda made, **options: rollouts(**options),
    "sam, draft model": lambda made, **options: SamAssistant(fallback=made.draft, **options),
    "sam, drafter": lambda made, **options: SamAssistant(fallback=made.drafter, **options),
}
# Whose corpora hold the texts.
KNOWING = ("sam with a corpus", "sam with a datastore")


@pytest.fixture(scope="module", params=cases(["LlamaForCausalLM", "Gemma3ForCausalLM"]))
def made(request, tmp_path_factory):
    model = build(request.param)
    texts = [run(model)[0].tolist(), run(model, PROMPT.flip(1))[0].tolist()]
    path = tmp_path_factory.mktemp("corpus") / "store"
    store = Datastore.build(texts, path, vocab_size=VOCAB, progress=False)
    drafts = {"draft": disturbed(model), "drafter": LogitNgramDrafter()}
    return SimpleNamespace(model=model, texts=texts, store=store, **drafts)


CASES = [
    *[("sam with a corpus", 6), ("rollouts", "auto")],
    *((name, budget) for name in KINDS for budget in ("auto", 6)),
]


@pytest.mark.parametrize(("name", "budget"), cases(dict.fromkeys(CASES), 2))
def test_the_assistant_is_lossless(made, name, budget):
    """And drafts what it knows unless measured costs may forbid it."""
    make = KINDS[name]
    if budget != 6 and made.model.config.model_type != "llama":
        pytest.skip("one budget of a model with windows is enough")
    assistant = make(made, budget=budget)
    greedy = check_lossless(made.model, assistant)
    assert name not in KNOWING or budget == "auto" or greedy.accepted > NEW_TOKENS // 2
    if (memory := getattr(assistant, "memory", None)) is not None:
        assert len(memory) == 4
        check_memory(memory)


def test_drafts_of_a_fallback_stand_behind_those_of_retrieval(llama):
    assistant = SamAssistant(fallback=eagle_head(llama))
    assert assistant.policy.hidden_layers
    assert [drafter.costly for drafter in assistant.drafters].count(True) == 1
    fallback = LogitNgramDrafter()
    assert SamAssistant(fallback=fallback).drafters[-2] is fallback


@pytest.mark.parametrize("named", [True, False])
def test_memory_may_be_filled_beforehand(llama, named):
    output = run(llama)[0, PROMPT.shape[1] :].tolist()
    memory = OutputMemory()
    memory.add(output, *([fingerprint(llama)] if named else []))
    assistant = SamAssistant(memory=memory, fallback=None, budget=8)
    assert assistant.memory is memory
    run(llama, assistant=assistant)
    assert assistant.stats.last.steps < NEW_TOKENS // 3
    assert len(memory) == 2


def test_a_vocabulary_smaller_than_the_fallbacks_table():
    check_lossless(build(vocab_size=5), SamAssistant(budget=6), ids=PROMPT % 5)


BAD_SIZES = [
    *((SamAssistant, {"budget": bad}) for bad in (-1, "papers", "paper")),
    *((SamAssistant, {"corpus": bad}) for bad in ([], [[], []], [[1, -2]])),
    (StaticAutomatonDrafter, {"corpus": [[]]}),
    *((SuffixDrafter, {"max_depth": bad}) for bad in (0, 1 << 17)),
    (SuffixDrafter, {"min_prob": 0.0}),
]
BELOW = {
    partial(RestDrafter, None): ("max_match", "max_nodes", "continuation", "sources"),
    partial(StaticAutomatonDrafter, [[1]]): ("max_draft",),
    partial(DraftModelDrafter, None): ("max_nodes", "max_levels", "width", "temperature"),
    partial(DFlashDrafter, None): ("top_k",),
    QuantizedSelf: ("max_levels",),
    Planner: ("max_nodes",),
}
BAD_SIZES += [
    *((kind, {name: 0}) for kind, names in BELOW.items() for name in names),
    *((Planner, {"budget": bad}) for bad in ("most", -1, 2.5, True, None)),
]


OTHER_KINDS = [
    *((SamAssistant, {"corpus": bad}) for bad in (5, [["a"]])),
    *((p, {"memory": []}) for p in (SamAssistant, SuffixDecoding)),
    (SamAssistant, {"memory": OutputMemory}),  # the class instead of an object
]


@pytest.mark.parametrize(
    ("error", "preset", "options"),
    [*((ValueError, *bad) for bad in BAD_SIZES), *((TypeError, *bad) for bad in OTHER_KINDS)],
)
def test_refuses_bad_values_and_other_kinds(error, preset, options):
    start = "^" if error is TypeError else ""
    with pytest.raises(error, match=rf"{start}\b{next(iter(options))}\b"):
        preset(**options)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("SuffixAssistant", "SamAssistant(memory=OutputMemory())"),
        ("RolloutAssistant", "OutputMemory(by_prompt=True, half_life=16)"),
        ("RestAssistant", "papers.Rest(datastore)"),
        ("SequoiaAssistant", "SamAssistant(fallback=draft_model)"),
        ("EarlyExit", "assistant_early_exit="),
        ("simulate", "from benchmarks.simulation import simulate, in the repository"),
    ],
)
def test_a_name_that_is_gone_tells_what_to_write(name, written):
    with pytest.raises(ImportError, match=f"^{name} is gone .*{re.escape(written)}"):
        exec(f"from hf_retrieval_assist import {name}")
    assert name not in dir(hf_retrieval_assist)
    assert not hasattr(hf_retrieval_assist, "NeverThere")


@needs("extensions/structured")
def test_an_assistant_shows_what_it_was_told(llama):
    memory = OutputMemory("1GB")
    assert memory.max_bytes == 1 << 30
    assert repr(memory).startswith("OutputMemory(0 outputs of 0 tokens, 0.0 of 1,024 MiB")
    assistant = SamAssistant(memory=memory, budget=8)
    assert repr(assistant) == f"SamAssistant(memory={memory!r})"
    assert repr(assistant.private()) == f"{assistant!r}.private()"
    twin = assistant.expecting([1, 2], rows=[[[3]], [[4]]])
    assert repr(twin) == f"{assistant!r}.expecting(<3 texts>)"
    ngrams = Assistant([LogitNgramDrafter()])
    assert repr(ngrams) == "Assistant([logit_ngrams, grammar], budget='auto')"
    assert repr(SamAssistant()) == repr(SamAssistant(budget="auto")) == "SamAssistant()"
    assert repr(SamAssistant(fallback=None)) == "SamAssistant(fallback=None)"
    assert repr(SamDecoding()) == "SamDecoding([automaton, token_recycling], budget=255)"
    assert repr(SamAssistant(fallback=[llama])) == "SamAssistant(fallback=[<LlamaForCausalLM>])"

    class Own(SamAssistant):
        def __init__(self, tokens, **options):
            super().__init__([tokens], **options)

    assert repr(Own([1, 2], budget=8)) == "Own(corpus=<1 document>)"


def test_an_assistant_shows_that_it_has_a_corpus(tmp_path):
    store = Datastore.build([[1, 2]], tmp_path / "store", vocab_size=9, progress=False)
    (tmp_path / "a.txt").write_text("text")
    for corpus, shown in (
        ([[1, 2], [3]], "<2 documents>"),
        (torch.ones((3, 2), dtype=torch.int32).numpy(), "<3 documents>"),
        (([n] for n in range(2)), "<documents>"),
        (store, repr(store)),
        (str(store.path), repr(str(store.path))),
    ):
        found = repr(SamAssistant(corpus, fallback=None))
        assert found == f"SamAssistant(corpus={shown}, fallback=None)"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("corpora", "corpus"), ("fall_back", "fallback"), ("graph", "graphs")],
)
def test_a_wrong_keyword_names_the_assistant_and_what_was_meant(wrong, meant):
    match = f"^SamAssistant: got an unexpected keyword argument '{wrong}'; did you mean '{meant}'"
    with pytest.raises(TypeError, match=match):
        SamAssistant(**{wrong: 1})


def test_a_path_is_no_memory():
    with pytest.raises(TypeError, match=r"got str; write OutputMemory\(path='x.log'\)"):
        SamAssistant(memory="x.log")


def test_the_target_in_few_bits_drafts_beside_a_table():
    table = "logit_ngrams"
    for fallback in ("quantized_self", [table, "quantized_self"], ["quantized_self", table]):
        drafters = fallback_drafters(fallback)
        assert [drafter.name for drafter in drafters] == [table, "quantized self"]
        assert not drafters[1].optional
    default = inspect.signature(SamAssistant).parameters["fallback"].default
    ngrams, own = fallback_drafters(default)
    assert (default, ngrams.name, own.name) == ("auto", table, "quantized self")
    assert own.optional
    assert [drafter.name for drafter in SamAssistant().drafters][1:3] == [table, own.name]
