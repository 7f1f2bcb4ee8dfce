"""Every preset inside `generate`: lossless, and with the parts it is made of."""

import copy
import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hf_retrieval_assist import (
    Assistant,
    Datastore,
    EarlyExit,
    OutputMemory,
    QuantizedSelf,
    RestAssistant,
    RolloutAssistant,
    SamAssistant,
    SequoiaAssistant,
    SuffixAssistant,
)
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.drafters.automaton import StaticAutomatonDrafter
from hf_retrieval_assist.drafters.rest import RestDrafter
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter
from hf_retrieval_assist.host.fingerprint import fingerprint
from hf_retrieval_assist.papers import SamDecoding, SuffixDecoding
from hf_retrieval_assist.policy.planner import Planner
from hf_retrieval_assist.policy.policy import DraftingPolicy
from hf_retrieval_assist.presets import Options, fallback_drafters
from tests.support.memories import check_memory
from tests.support.parts import needs

from .support.fixed_costs import FixedCosts
from .support.heads import eagle_head
from .support.laws import assert_follows, exact_law
from .support.lossless import NEW_TOKENS, PHRASE, PROMPT, build, run, same
from .support.tiny_models import VOCAB

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
SLOW_STEPS = FixedCosts(lambda tokens: 1.0)  # any drafting takes no time beside these


def draft_of(model):
    """A draft model that is right most of the time: the model with a disturbed output layer."""
    draft = copy.deepcopy(model)
    weight = draft.get_output_embeddings().weight
    weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return draft


def check_lossless(model, assistant, ids=PROMPT):
    """Greedy, sampled and in a batch; the figures of the greedy call."""
    same(model, ids, assistant)
    greedy = assistant.stats.last
    same(model, ids, assistant, **SAMPLING)
    same(model, torch.cat([ids, ids.flip(1)]), assistant)
    return greedy


@pytest.mark.parametrize("preset", [SamAssistant, SuffixAssistant, RolloutAssistant, RestAssistant])
def test_defaults_draft_a_text_that_repeats_itself(llama, tmp_path, preset):
    arguments = []
    if preset is RestAssistant:
        path = tmp_path / "store"
        arguments = [Datastore.build([PHRASE * 20], path, vocab_size=VOCAB, progress=False)]
    assistant = preset(*arguments, costs=SLOW_STEPS)
    text = {"prefix_allowed_tokens_fn": lambda row, ids: [PHRASE[len(ids) % len(PHRASE)]]}
    same(llama, assistant=assistant, calls=3, max_new_tokens=60, **text)
    assert assistant.stats.total.accepted > 20


def test_the_default_draws_trees_of_a_draft_model_that_costs_little():
    """A draft model of one layer; the target's others add nothing."""
    draft = build(num_hidden_layers=1)
    target = build(num_hidden_layers=24)
    target.load_state_dict(draft.state_dict(), strict=False)
    for layer in target.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    assistant = SequoiaAssistant(draft, costs=SLOW_STEPS)
    same(target, assistant=assistant, calls=3, max_new_tokens=60)
    assert assistant.stats.total.accepted > 20


SIZES = {"max_nodes": 8, "max_levels": 3, "width": 3}

# Those of the model, of documents of what it generates, of these on disk, and of a draft model.
KINDS = {
    "sam": lambda made, **options: SamAssistant(**options),
    "sam alone": lambda made, **options: SamAssistant(fallback=None, **options),
    "sam with a memory": lambda made, **options: SamAssistant(memory=OutputMemory(), **options),
    "sam without kernels": lambda made, **options: SamAssistant(reroute=False, **options),
    "sam with a corpus": lambda made, **options: SamAssistant(made.texts, **options),
    "sam with a datastore": lambda made, **options: SamAssistant(made.store, **options),
    "suffix": lambda made, **options: SuffixAssistant(**options),
    "suffix of chains": lambda made, **options: SuffixAssistant(tree=False, **options),
    "suffix alone": lambda made, **options: SuffixAssistant(fallback=None, **options),
    "rest": lambda made, **options: RestAssistant(made.store, **options),
    "sequoia": lambda made, **options: SequoiaAssistant(made.draft, **SIZES, **options),
    "sam, draft model": lambda made, **options: SamAssistant(fallback=made.draft, **options),
    "suffix, draft model": lambda made, **options: SuffixAssistant(fallback=made.draft, **options),
    "sam, drafter": lambda made, **options: SamAssistant(fallback=made.drafter, **options),
}
# Texts as short as these are matched by less than the paper asks for.
Sam = partial(SamDecoding, min_match=3)
PAPERS = {
    "sam": lambda made: SamDecoding(),
    "sam alone": lambda made: SamDecoding(fallback=None),
    "sam with a memory": lambda made: SamDecoding(memory=OutputMemory()),
    "sam with a corpus": lambda made: Sam(made.texts),
    "sam with a datastore": lambda made: Sam(made.store),
    "suffix": lambda made: SuffixDecoding(),
    "suffix of chains": lambda made: SuffixDecoding(tree=False),
    "suffix alone": lambda made: SuffixDecoding(fallback=None),
    "rest": lambda made: RestAssistant(made.store, sources=1, budget=64),
    "sequoia": lambda made: SequoiaAssistant(made.draft, **SIZES, budget=8),
    "sam, draft model": lambda made: SamDecoding(fallback=made.draft),
    "suffix, draft model": lambda made: SuffixDecoding(fallback=made.draft),
    "sam, drafter": lambda made: SamDecoding(fallback=made.drafter),
}
# Whose corpora hold the texts.
KNOWING = ("sam with a corpus", "sam with a datastore", "rest")


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Gemma3ForCausalLM"])
def made(request, tmp_path_factory):
    model = build(request.param)
    texts = [run(model)[0].tolist(), run(model, PROMPT.flip(1))[0].tolist()]
    path = tmp_path_factory.mktemp("corpus") / "store"
    store = Datastore.build(texts, path, vocab_size=VOCAB, progress=False)
    drafts = {"draft": draft_of(model), "drafter": TokenRecyclingDrafter(top_k=4)}
    return SimpleNamespace(model=model, texts=texts, store=store, **drafts)


CASES = [(name, make, budget) for name, make in KINDS.items() for budget in ("auto", 6)]
CASES += [(name, make, "paper") for name, make in PAPERS.items()]


@pytest.mark.parametrize(("name", "make", "budget"), CASES)
def test_every_preset_is_lossless(made, name, make, budget):
    """And drafts what it knows unless measured costs may forbid it."""
    if budget != 6 and made.model.config.model_type != "llama":
        pytest.skip("one budget of a model with windows is enough")
    assistant = make(made) if budget == "paper" else make(made, budget=budget)
    greedy = check_lossless(made.model, assistant)
    assert name not in KNOWING or budget == "auto" or greedy.accepted > NEW_TOKENS // 2
    assert name != "sequoia" or budget == "auto" or greedy.accepted > 0
    if (memory := getattr(assistant, "memory", None)) is not None:
        assert len(memory) == 4
        check_memory(memory)


def test_drafts_of_a_fallback_stand_behind_those_of_retrieval(llama):
    assistant = SamAssistant(fallback=eagle_head(llama))
    assert assistant.policy.hidden_layers
    assert [drafter.costly for drafter in assistant.drafters].count(True) == 1
    fallback = TokenRecyclingDrafter(top_k=4)
    assert SamAssistant(fallback=fallback).drafters[-2] is fallback


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("preset", [SamAssistant, SuffixAssistant])
def test_memory_may_be_filled_beforehand(llama, preset, named):
    output = run(llama)[0, PROMPT.shape[1] :].tolist()
    memory = OutputMemory()
    memory.add(output, *([fingerprint(llama)] if named else []))
    assistant = preset(memory=memory, fallback=None, budget=8)
    assert assistant.memory is memory
    run(llama, assistant=assistant)
    assert assistant.stats.last.steps < NEW_TOKENS // 3
    assert len(memory) == 2


@pytest.mark.parametrize("temperature", [None, 0.6])
def test_a_perfect_draft_model_is_accepted_to_the_end(llama, temperature):
    sizes = {"max_nodes": 4, "max_levels": 4, "width": 1}
    assistant = SequoiaAssistant(llama, temperature, budget=4, **sizes)
    # Drafted at one temperature, accepted at any: greedy decoding draws nothing.
    same(llama, assistant=assistant)
    if temperature is None:
        assert assistant.stats.last.accepted == assistant.stats.last.drafted
    else:
        # Equal laws accept the first child.
        run(llama, do_sample=True, temperature=temperature, top_k=0, assistant=assistant)
        assert assistant.stats.last.accepted == assistant.stats.last.drafted > 0


def test_a_vocabulary_smaller_than_the_fallbacks_table():
    check_lossless(build(vocab_size=5), SamAssistant(budget=6), ids=PROMPT % 5)


BAD_SIZES = [
    (SamDecoding, {"min_match": -1}),
    (SamDecoding, {"corpus_bias": -1, "corpus": [[1]]}),
    (SamDecoding, {"max_draft": 0}),
    # A memory has its own.
    (RolloutAssistant, {"half_life": 16.0, "memory": OutputMemory()}),
    (RolloutAssistant, {"max_bytes": 1 << 20, "memory": OutputMemory()}),
    (SamAssistant, {"max_nodes": 0}),
    *((SamAssistant, {"budget": bad}) for bad in (-1, "papers", "paper")),
    *((SamAssistant, {"corpus": bad}) for bad in ([], [[], []], [[1, -2]])),
    (StaticAutomatonDrafter, {"corpus": [[]]}),
    *((SuffixAssistant, {name: 0.0}) for name in ("alpha", "min_prob")),
    *((SuffixAssistant, {"max_depth": bad}) for bad in (0, 1 << 17)),
    (SuffixDecoding, {"threshold": -1.0}),
]
# What no tree may be by its children's counts, or is not called.
NO_TREES = ((), (1,), (0, 0), (2, 0), (2, -1, 0), (0, 1), (1, 0, 2, 0), "3.3.3")
BELOW = {
    partial(RestDrafter, None): ("max_match", "max_nodes", "continuation", "sources"),
    partial(StaticAutomatonDrafter, [[1]]): ("max_draft", "min_match", "max_children"),
    partial(DraftModelDrafter, None): ("max_nodes", "max_levels", "width", "temperature"),
    partial(DFlashDrafter, None): ("top_k",),
    EarlyExit: ("layer",),
    TokenRecyclingDrafter: ("top_k",),
    QuantizedSelf: ("bits", "max_levels"),
    Planner: ("max_nodes",),
}
BAD_SIZES += [
    *((kind, {name: 0}) for kind, names in BELOW.items() for name in names),
    *((TokenRecyclingDrafter, {"template": bad}) for bad in NO_TREES),
    *((Planner, {"budget": bad}) for bad in ("most", -1, 2.5, True, None)),
    *((Planner, {"exploration": bad}) for bad in (1.0, -0.1)),
]


OTHER_KINDS = [
    *((SamAssistant, {"corpus": bad}) for bad in (5, [["a"]])),
    *((p, {"memory": []}) for p in (SamAssistant, SuffixAssistant, SamDecoding, SuffixDecoding)),
    (SamAssistant, {"memory": OutputMemory}),  # the class instead of an object
    (RestAssistant, {"datastore": [[1, 2]]}),
    (SequoiaAssistant, {"draft_model": "a name"}),
]


@pytest.mark.parametrize(
    ("error", "preset", "options"),
    [*((ValueError, *bad) for bad in BAD_SIZES), *((TypeError, *bad) for bad in OTHER_KINDS)],
)
def test_refuses_bad_values_and_other_kinds(error, preset, options):
    start = "^" if error is TypeError else ""
    with pytest.raises(error, match=rf"{start}\b{next(iter(options))}\b"):
        preset(**options)


PRESETS = [SamAssistant, SuffixAssistant, RolloutAssistant, RestAssistant, SequoiaAssistant]


@pytest.mark.parametrize("preset", PRESETS)
def test_signatures_name_shared_options_with_the_policys_defaults(preset):
    shared = inspect.signature(DraftingPolicy).parameters
    for signature in (inspect.signature(preset), inspect.signature(preset.__init__)):
        for name in ("budget", *Options.__annotations__):
            assert signature.parameters[name].default == shared[name].default
            assert signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    # All that the policy takes is shared, or what each preset decides itself.
    own = {"drafters", "budget", "max_nodes", "residual"}
    assert set(shared) - {*Options.__annotations__} == own


@needs("extensions/structured")
def test_an_assistant_shows_what_it_was_told(llama):
    recycling = Assistant([TokenRecyclingDrafter()])
    assert repr(recycling) == "Assistant([token_recycling, grammar], budget='auto')"
    assert repr(SamAssistant()) == repr(SamAssistant(budget="auto")) == "SamAssistant()"
    shown = repr(SamDecoding(None, None, 3, reroute=False))
    assert shown == "SamDecoding(fallback=None, min_match=3, reroute=False)"
    assert repr(SamAssistant(fallback=[llama])) == "SamAssistant(fallback=[<LlamaForCausalLM>])"

    class Own(SamAssistant):
        def __init__(self, tokens, **options):
            super().__init__([tokens], **options)

    assert repr(Own([1, 2], budget=8)) == "Own(corpus=<documents>, budget=8)"


@pytest.mark.parametrize("make", [SamAssistant, SamDecoding])
def test_an_assistant_shows_that_it_has_a_corpus(make, tmp_path):
    store = Datastore.build([[1, 2]], tmp_path / "store", vocab_size=9, progress=False)
    array = torch.ones((3, 2), dtype=torch.int32).numpy()
    for corpus in ([[1, 2], [3]], array, ([n] for n in range(2)), store, str(store.path)):
        shown = repr(corpus) if isinstance(corpus, str) else "<documents>"
        found = repr(make(corpus, fallback=None))
        assert found == f"{make.__name__}(corpus={shown}, fallback=None)"


@pytest.mark.parametrize(
    ("make", "wrong", "meant"),
    [
        (SamAssistant, "corpora", "corpus"),
        (SamAssistant, "fall_back", "fallback"),
        (SamAssistant, "graph", "graphs"),
        (SuffixAssistant, "min_probability", "min_prob"),
        (RolloutAssistant, "halflife", "half_life"),
        (RestAssistant, "store", "datastore"),
        (SequoiaAssistant, "draftmodel", "draft_model"),
        (SamDecoding, "min_matches", "min_match"),
        (SuffixDecoding, "treshold", "threshold"),
    ],
)
def test_a_wrong_keyword_names_the_assistant_and_what_was_meant(make, wrong, meant):
    said = rf"^{make.__name__}: .*; did you mean {meant}= by {wrong}=\?"
    with pytest.raises(TypeError, match=said):
        make(**{wrong: 1})


def test_arguments_that_are_missing_or_too_many_name_the_assistant():
    for kind in (RestAssistant, SequoiaAssistant):
        with pytest.raises(TypeError, match=f"^{kind.__name__}: missing a required argument"):
            kind()
    with pytest.raises(TypeError, match=r"^SamAssistant: too many positional arguments"):
        SamAssistant(None, None, None, None)
    with pytest.raises(TypeError, match=r"got str; write OutputMemory\(path='x.log'\)"):
        SamAssistant(memory="x.log")


def test_the_target_in_few_bits_drafts_beside_a_table():
    for table in ("logit_ngrams", "token_recycling"):
        alone = ("quantized_self", ["quantized_self"]) if table == "logit_ngrams" else ()
        for fallback in (*alone, [table, "quantized_self"], ["quantized_self", table]):
            drafters = fallback_drafters(fallback)
            assert [drafter.name for drafter in drafters] == [table, "quantized self"]
            assert not drafters[1].optional
    for preset in (SamAssistant, SuffixAssistant):
        default = inspect.signature(preset).parameters["fallback"].default
        table, own = fallback_drafters(default)
        assert (default, table.name, own.name) == ("auto", "logit_ngrams", "quantized self")
        assert own.optional
        assert [drafter.name for drafter in preset().drafters][1:3] == [table.name, own.name]
    for paper in (SamDecoding(), SuffixDecoding()):
        assert "quantized self" not in [drafter.name for drafter in paper.drafters]


# The law of residual sampling, on a vocabulary small enough to enumerate.
SMALL = 12


@pytest.fixture(scope="module")
def small_models():
    """A target and a draft model that is no copy of it."""
    target = build(vocab_size=SMALL, num_hidden_layers=1)
    draft = build("GPT2LMHeadModel", vocab_size=SMALL, n_layer=1)
    for model in (target, draft):
        # Flat enough that all tokens count.
        model.get_output_embeddings().weight.data *= 0.4
    return target, draft


@pytest.mark.parametrize(
    ("temperature", "top_p", "budget", "rows"),
    [
        (0.7, 1.0, 4, 500),
        (1.3, 0.8, 2, 500),
        pytest.param(0.7, 0.9, 2, 4000, marks=pytest.mark.slow),
        pytest.param(1.5, 1.0, 4, 4000, marks=pytest.mark.slow),
    ],
)
def test_residual_sampling_keeps_the_law(small_models, temperature, top_p, budget, rows):
    target, draft = small_models
    prompt = [5, 9, 3, 5]
    law = exact_law(target, prompt, temperature, top_p)
    sizes = {"max_nodes": 4, "max_levels": 2, "width": 3}
    assistant = SequoiaAssistant(draft, temperature, budget=budget, **sizes)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0, "do_sample": True}
    ids = torch.tensor([prompt]).expand(rows, -1)
    result = run(target, ids, **sampling, max_new_tokens=3, assistant=assistant)
    assert assistant.stats.last.accepted > rows // 10
    assert assistant.stats.last.accepted < assistant.stats.last.drafted
    assert_follows(result[:, -3:], law)
