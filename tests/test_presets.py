"""The assistant inside `generate`: lossless, and with the parts it is made of."""

import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
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
from hf_retrieval_assist.papers import Rest, SamDecoding, Sequoia, SuffixDecoding, TokenRecycling
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


# Made of documents of what the model generates, of these on disk, and of a draft model.
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
    "sam, head": lambda made, **options: SamAssistant(fallback=made.head, **options),
}
# Texts as short as these are matched by less than the paper asks for.
OF_SHORT = {"min_match": 3, "corpus_bias": 0}
PAPERS = {
    "paper sam": lambda made: SamDecoding(),
    "paper sam alone": lambda made: SamDecoding(fallback=None, **OF_SHORT),
    "paper sam with a corpus": lambda made: SamDecoding(made.texts, **OF_SHORT),
    "paper sam, draft model": lambda made: SamDecoding(fallback=made.draft),
    "paper sam, drafters": lambda made: SamDecoding(fallback=[made.drafter, TokenRecycling()]),
    "paper suffix": lambda made: SuffixDecoding(),
    "paper suffix, table": lambda made: SuffixDecoding(fallback="token_recycling"),
    "paper suffix, draft model": lambda made: SuffixDecoding(threshold=2.0, fallback=made.draft),
    "paper rest": lambda made: Rest(made.store),
    "paper sequoia": lambda made: Sequoia(made.draft, nodes=8, levels=3, width=3),
}
# Whose corpora hold the texts.
KNOWING = (
    *("sam with a corpus", "sam with a datastore"),
    *("paper sam with a corpus", "paper rest"),
)


@pytest.fixture(scope="module", params=cases(["LlamaForCausalLM", "Gemma3ForCausalLM"]))
def made(request, tmp_path_factory):
    model = build(request.param)
    texts = [run(model)[0].tolist(), run(model, PROMPT.flip(1))[0].tolist()]
    path = tmp_path_factory.mktemp("corpus") / "store"
    store = Datastore.build(texts, path, vocab_size=VOCAB, progress=False)
    drafts = {"draft": disturbed(model), "drafter": LogitNgramDrafter(), "head": eagle_head(model)}
    return SimpleNamespace(model=model, texts=texts, store=store, **drafts)


CASES = [
    *[("sam with a corpus", 6), ("rollouts", "auto"), ("sam, head", 6)],
    *((name, None) for name in PAPERS),
    *((name, budget) for name in KINDS for budget in ("auto", 6)),
]


@pytest.mark.parametrize(("name", "budget"), cases(dict.fromkeys(CASES), 13))
def test_the_assistant_is_lossless(made, name, budget):
    """It drafts what it knows unless measured costs may forbid it."""
    if budget != 6 and made.model.config.model_type != "llama":
        pytest.skip("one budget of a model with windows is enough")
    assistant = PAPERS[name](made) if budget is None else KINDS[name](made, budget=budget)
    greedy = check_lossless(made.model, assistant)
    assert name not in KNOWING or budget == "auto" or greedy.accepted > NEW_TOKENS // 2
    assert name != "paper sequoia" or greedy.accepted > 0
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


BAD_SIZES = [
    *((SamAssistant, {"budget": bad}) for bad in (-1, "papers", "paper")),
    *((SamAssistant, {"corpus": bad}) for bad in ([], [[], []], [[1, -2]])),
    (StaticAutomatonDrafter, {"corpus": [[]]}),
    *((SuffixDrafter, {"max_depth": bad}) for bad in (0, 1 << 17)),
    (SuffixDrafter, {"min_prob": 0.0}),
    *((SamDecoding, {name: -1}) for name in ("min_match", "corpus_bias", "max_draft")),
    *((SuffixDecoding, bad) for bad in ({"alpha": 0.0}, {"threshold": -1.0})),
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


@pytest.mark.parametrize(("kind", "options"), BAD_SIZES)
def test_refuses_bad_values(kind, options):
    with pytest.raises(ValueError, match=rf"\b{next(iter(options))}\b"):
        kind(**options)


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


@needs("extensions/structured")
def test_an_assistant_shows_what_it_was_told(llama):
    memory, documents = OutputMemory("1GB"), np.ones((3, 2), np.int32)
    assert repr(memory).startswith("OutputMemory(0 outputs of 0 tokens, 0.0 of 1,024 MiB")
    remembers = SamAssistant(memory=memory, budget=8)
    told = f"SamAssistant(memory={memory!r})"

    class Own(SamAssistant):
        def __init__(self, tokens, **options):
            super().__init__([tokens], **options)

    for assistant, shown in (
        (remembers, told),
        (remembers.private(), f"{told}.private()"),
        (remembers.expecting([1, 2], rows=[[[3]], [[4]]]), f"{told}.expecting(<3 texts>)"),
        (SamAssistant(budget="auto"), "SamAssistant()"),
        (SamAssistant(fallback=None), "SamAssistant(fallback=None)"),
        (SamAssistant(fallback=[llama]), "SamAssistant(fallback=[<LlamaForCausalLM>])"),
        (SamAssistant(documents), "SamAssistant(corpus=<3 documents>)"),
        (SamAssistant([n] for n in range(2)), "SamAssistant(corpus=<documents>)"),
        (Own([1, 2], budget=8), "Own(corpus=<1 document>)"),
        (Assistant([LogitNgramDrafter()]), "Assistant([logit_ngrams, grammar], budget='auto')"),
        (SamDecoding(), "SamDecoding([automaton, token_recycling], budget=255)"),
    ):
        assert repr(assistant) == shown


def test_a_name_that_is_gone_tells_what_to_write():
    with pytest.raises(ImportError, match=r"^RestAssistant is gone .*papers.Rest\(datastore\)"):
        exec("from hf_retrieval_assist import RestAssistant")
    assert "RestAssistant" not in dir(hf_retrieval_assist)


@pytest.mark.parametrize(
    ("make", "wrong", "meant"),
    [(SamAssistant, "fall_back", "fallback"), (SuffixDecoding, "treshold", "threshold")],
)
def test_a_wrong_keyword_names_the_assistant_and_what_was_meant(make, wrong, meant):
    match = f"^{make.__name__}: got an unexpected keyword argument '{wrong}'.*'{meant}'"
    with pytest.raises(TypeError, match=match):
        make(**{wrong: 1})


@pytest.mark.parametrize("make", [lambda: SamAssistant(budget=6), SamDecoding])
def test_a_vocabulary_smaller_than_the_fallbacks_table(make):
    check_lossless(build(vocab_size=5), make(), ids=PROMPT % 5)
