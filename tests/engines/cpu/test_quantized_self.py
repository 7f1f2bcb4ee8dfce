"""Drafts of the target itself in few bits."""

import copy
import gc
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_retrieval_assist import Assistant, QuantizedSelf, SamAssistant, release_memory
from hf_retrieval_assist.cache.kv_cache import SlotCache
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.engines.cpu import few_bits, repeated_forward, tree_verifier
from hf_retrieval_assist.engines.cpu import quantized_self as module
from hf_retrieval_assist.engines.cpu.few_bits import FewBits, bytes_of
from hf_retrieval_assist.engines.cpu.linear import overrides
from hf_retrieval_assist.engines.cpu.quantized import IN_FOUR_BITS, FourBitWeight, QuantizedWeight
from hf_retrieval_assist.engines.cpu.tree_verifier import CpuTreeVerifier
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.system import memory
from hf_retrieval_assist.types.row_text import RowText
from hf_retrieval_assist.verification.own_forwards import TargetForwards
from tests.support.few_bits import pack_small
from tests.support.fixed_costs import FixedCosts
from tests.support.lossless import PROMPT, build, padded, run, same
from tests.support.memories import remembering
from tests.support.one_text import OneText
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases, crossed
from tests.support.rounding import near
from tests.support.tiny_models import VOCAB
from tests.support.watching import (
    Interrupt,
    calls_of,
    interrupted_forward,
    results_of,
)

# Those whose heads the kernel computes: windows of six tokens, experts in one tensor, an output
# layer with a bias.
FAMILIES = {
    "LlamaForCausalLM": {"head_dim": 16},
    "Gemma3ForCausalLM": {"head_dim": 16},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "MixtralForCausalLM": {"head_dim": 16},
    "PhiForCausalLM": {"hidden_size": 64},
}
SAMPLINGS = {
    "greedy": {},
    "hot": {"do_sample": True, "temperature": 1.5},
    "top": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "processed": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
NEW = 30


@pytest.fixture(autouse=True)
def price(monkeypatch):
    return pack_small(monkeypatch)


@pytest.fixture(scope="module")
def llama():
    return build(head_dim=16)


@pytest.fixture
def compiled(monkeypatch):
    """Whether each level of a draft was computed."""
    return results_of(monkeypatch, CpuTreeVerifier, "draft_level", lambda x, *_: x is not None)


def assistant(**options):
    return Assistant([QuantizedSelf(**options)], budget=16, trust_forward=True)


def made(name):
    """A model, of which the bias of an output layer decides more than its weights."""
    model = build(name, **FAMILIES[name])
    if (bias := model.get_output_embeddings().bias) is not None:
        bias.data.normal_(generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize(("name", "sampling"), cases(crossed(FAMILIES, SAMPLINGS), 3))
def test_output_is_plain(name, sampling, compiled):
    """Tokens and random state; most drafts are accepted."""
    model, drafting = made(name), assistant()
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    options = {"do_sample": False, "max_new_tokens": NEW} | SAMPLINGS[sampling]
    agreeing(model, inputs, seed=3, make=lambda plain: drafting, **options)
    stats = drafting.stats.last
    assert stats.tier == "tree"
    assert stats.keeps_seed
    assert stats.accepted > 0.8 * stats.steps
    assert sum(compiled) > stats.steps
    for dtype in (torch.bfloat16, torch.float16) if sampling == "greedy" else ():
        run(model.to(dtype), **options, assistant=drafting)
        assert drafting.stats.last.steps < 0.6 * NEW


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize(("name", "sampling"), cases(crossed(FAMILIES, SAMPLINGS), 3))
def test_texts_of_a_batch_are_drafted_for_together(name, sampling, rows, monkeypatch):
    """One compiled call a level, filled up; of rows that are padded, and end one by one."""
    monkeypatch.setattr(repeated_forward, "WIDTHS", (1, 8, 32, 64))
    model, drafting = made(name), assistant()
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": [7, 9], "pad_token_id": 0}
    options |= SAMPLINGS[sampling]
    for _ in range(2):
        agreeing(model, padded(rows), seed=3, make=lambda plain: drafting, **options)
    stats = drafting.stats.last
    assert stats.keeps_seed
    assert stats.accepted > 0.8 * stats.steps


def test_levels_are_priced_for_the_texts_that_have_room_for_them():
    draft, rooms = object.__new__(module._Draft), [1] * 15 + [8]
    draft.chains = [SimpleNamespace(room=room, reached=1.0, nodes=[]) for room in rooms]
    draft._seconds = [0.01] * (1 + few_bits.CHOICES * sum(rooms))
    draft._levels, draft._spent, packed = 0, 0.0, SimpleNamespace(certainty=0.9)
    draft._given = SimpleNamespace(weights=packed)
    assert [draft._pays(draft.chains, level, 1.0) for level in (1.0, 0.005)] == [False, True]


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


# Models, inputs and options of assistants of which no forward of one token is a compiled call.
IDLE = {
    "soft caps": (partial(build, "Gemma2ForCausalLM"), {}, {}),
    "a hook of a caller's": (lambda **sizes: hooked(build(**sizes)), {}, {}),
    "no kernels": (build, {}, {"reroute": False}),
    "no recordings": (build, {}, {"graphs": False}),
}


@pytest.mark.parametrize("name", IDLE)
def test_nothing_is_packed_or_drafted_where_levels_are_no_compiled_calls(
    name, compiled, monkeypatch
):
    """Nor is more fed than it takes to see that."""
    make, inputs, options = IDLE[name]
    model, fed = make(head_dim=16), calls_of(monkeypatch, CpuTreeVerifier, "_grow")
    drafting = Assistant([QuantizedSelf()], budget=16, trust_forward=True, **options)
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)} | inputs
    options = {"do_sample": False, "max_new_tokens": NEW}
    graphs = drafting.policy.graphs
    for _ in range(2):
        agreeing(model, inputs, make=lambda plain: drafting, graphs=graphs, **options)
    assert not any(compiled)
    assert FewBits.known_of(model) is None
    assert len(fed) <= tree_verifier.MOST_RECORDING


@pytest.mark.parametrize("sampling", cases(SAMPLINGS))
def test_the_first_rows_of_a_large_output_layer_and_those_of_texts_are_enough(
    sampling, monkeypatch, compiled
):
    monkeypatch.setattr(few_bits, "LEAST_ROWS", 256)
    model = build(vocab_size=1000, head_dim=16)
    options = {"max_new_tokens": 60} | SAMPLINGS[sampling]
    accepted = [same(model, assistant=assistant(), **options)[2].stats.last.accepted for _ in "12"]
    output = FewBits.known_of(model).output
    assert output.first == 256
    assert 100 < output.seen < 300
    assert sum(compiled) > 60
    assert 24 < accepted[1] > accepted[0]


def test_no_draft_has_more_nodes_than_it_may(monkeypatch):
    sizes = results_of(
        *(monkeypatch, QuantizedSelf, "propose"), lambda drafts, *_: max(drafts.sizes)
    )
    same(build(head_dim=16), PROMPT, Assistant([QuantizedSelf()], budget=2))
    assert max(sizes) == 2


@pytest.mark.parametrize("new", [2, 3, 6, 12])
def test_nothing_is_fed_behind_the_last_position(new):
    """A forward of one token is recorded before the first draft of a call, if there is room."""
    model = build(head_dim=16)
    ids = PROMPT.repeat(1, 10)[:, : model.config.max_position_embeddings - new]
    for _ in range(2):
        same(model, ids, assistant(), max_new_tokens=new, tier="tree")


@pytest.mark.parametrize("forwards", cases([2, 3, 8]))
def test_an_interrupted_draft_leaves_a_cache_to_go_on_from(forwards):
    model, drafting = build("Gemma3ForCausalLM"), assistant()
    plain, cache = run(model, max_new_tokens=NEW), DynamicCache(config=model.config)
    with pytest.raises(Interrupt), interrupted_forward(model, forwards):
        run(model, max_new_tokens=NEW, **{CACHE: cache}, assistant=drafting)
    assert not overrides.by_id
    held = plain[:, : max(PROMPT.shape[1], cache.get_seq_length() + 1)]
    rest = plain.shape[1] - held.shape[1]
    again = run(model, held, max_new_tokens=rest, **{CACHE: cache}, assistant=drafting)
    assert torch.equal(again, plain)


def test_weights_are_packed_once_and_anew_when_they_change():
    model = build(tie_word_embeddings=True, head_dim=16)
    run(model, assistant=assistant())
    packed = FewBits.known_of(model)
    kinds = {name: type(packed.by_id.get(id(x))) for name, x in model.named_parameters()}
    assert kinds["model.layers.2.mlp.up_proj.weight"] is FourBitWeight
    assert kinds["model.embed_tokens.weight"] is QuantizedWeight  # and the output layer's
    assert kinds["model.norm.weight"] is type(None)
    assert bytes_of(model)[0] == 0
    for _ in range(2):
        run(model, assistant=assistant())
        assert FewBits.known_of(model) is packed
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, 0))
    assert FewBits.known_of(model) is None
    drafting = assistant()
    assert torch.equal(run(model, assistant=drafting), run(model))
    assert drafting.stats.last.steps < 10
    anew = FewBits.known_of(model)
    assert not any(anew.by_id[key] is copy for key, copy in packed.by_id.items())


def test_columns_count_by_what_the_last_tokens_multiply_them_by(monkeypatch):
    """They are read once more, in one forward, of which nothing stays."""
    model, inputs = build(head_dim=16), {"input_ids": PROMPT[:, :5]}
    text = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    fed = calls_of(monkeypatch, CpuTreeVerifier, "feed_again")
    # Nobody has looked whether what was computed is finite.
    zeroed = calls_of(monkeypatch, SlotCache, "zero_unused")
    agreeing(model, inputs, make=lambda plain: assistant(), max_new_tokens=12, do_sample=False)
    assert zeroed
    read = text[:, -64:]
    assert [texts for _, texts in fed] == [read.tolist()]
    block = model.model.layers[0]  # whose attention reads tokens alone
    with torch.no_grad():
        squares = block.input_layernorm(model.model.embed_tokens(read)).square().flatten(0, 1)
    mean, alike = squares.mean(0) / squares.mean(), few_bits._ALIKE / len(squares)
    packed = FewBits.known_of(model).by_id[id(block.self_attn.q_proj.weight)]
    expected = (mean + alike) / (1 + alike)
    assert torch.allclose(packed.column_weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "most", "rooms", "expected"),
    [
        ([[1, 2, 3]], 64, [None], [[1, 2, 3, 9]]),
        ([[1, 2, 3]], 2, [None], [[3, 9]]),
        ([[1, 2, 3]], 64, [0], [[9]]),
        ([[1, 50, 3]], 64, [None], [[3, 9]]),
        ([[1, 2, -1]], 64, [None], [[9]]),
        ([[1, 2, 3], [50, 5, 6]], 64, [2, None], [[2, 3, 9], [5, 6, 9]]),
    ],
)
def test_what_is_read_once_more(prompts, most, rooms, expected):
    """As much of every row, no placeholder, and nothing for which there is no room."""
    own, fed = TargetForwards(), []
    rows = [RowText(i, torch.tensor(ids), 4) for i, ids in enumerate(prompts)]
    for row in rows:
        row.generated.append(9)
    own.verifier, own._rows = SimpleNamespace(most_fed=100, feed_again=fed.append), rows
    own._deepest = lambda row: rooms[row.index]
    own.feed_again(most, 50)
    assert fed == [expected]


@pytest.mark.parametrize("special", [0.0, torch.inf, torch.nan])
def test_columns_count_alike_where_nothing_can_be_told_of_them(special):
    model = build(head_dim=16)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.full((3, layer.in_features), special)
    with torch.no_grad():
        packed = FewBits.of(model, lambda: layer(x))
    assert packed.by_id[id(layer.weight)].column_weights is None
    assert packed.by_id[id(model.model.layers[1].mlp.down_proj.weight)].column_weights is None


def test_writes_that_nobody_counts_are_noticed_within_some_calls():
    model = build(head_dim=16)
    packed = FewBits.of(model)
    model.model.layers[1].mlp.down_proj.weight.data.neg_()
    plain = run(model)
    for _ in range(few_bits._LOOK_PERIOD):
        assert torch.equal(run(model, assistant=assistant()), plain)
    assert FewBits.of(model) is not packed


def test_copies_take_what_was_foreseen_and_go_with_their_model():
    gc.collect()
    known = IN_FOUR_BITS.nbytes()
    model = build(head_dim=16)
    missing = bytes_of(model)[0]
    run(model, assistant=assistant())
    last = FewBits.known_of(model).output.whole.nbytes
    assert FewBits.known_of(model).nbytes == missing == IN_FOUR_BITS.nbytes() - known + last
    del model
    gc.collect()
    assert IN_FOUR_BITS.nbytes() == known


def test_adapters_stay_as_they_are():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, lora_alpha=32)
    model = peft.get_peft_model(build(num_hidden_layers=2, head_dim=16), config)
    model.add_adapter("other", config)
    drafting = assistant()
    for name in ("default", "other"):
        model.set_adapter(name)
        same(model, assistant=drafting, max_new_tokens=NEW)
        assert drafting.stats.last.steps < 0.6 * NEW
    small = {id(p) for n, p in model.named_parameters() if "lora" in n}
    assert not small & FewBits.of(model).by_id.keys()


def test_what_it_cannot_do_is_one_error(llama):
    ids, elsewhere = np.array([1, 2], np.int32), build().to("meta")
    for model, message in (
        (None, "expected the target model, got none"),
        (elsewhere, "on a CPU, got one on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedSelf().start(ids, Target(VOCAB, model=model))
    session = OneText(QuantizedSelf(), ids, Target(VOCAB, model=llama))
    with pytest.raises(ValueError, match="expected a call of generate"):
        session.propose(4)


@pytest.fixture
def depths(monkeypatch):
    """Each step's draft's, where a verification of any width takes 10 ms."""
    found = []
    original = QuantizedSelf.propose

    def propose(drafter, sessions, budgets):
        for session in sessions:
            session.curve = lambda n: np.full(n, 0.01)
        drafts = original(drafter, sessions, budgets)
        found.append(int(drafts[0].depths.max(initial=0)))
        return drafts

    monkeypatch.setattr(QuantizedSelf, "propose", propose)
    return found


def test_a_draft_grows_while_a_level_pays_which_is_tried_now_and_then(
    llama, price, depths, monkeypatch
):
    """Where it was dear, one level now and then, between asks some steps; where nobody knows,
    one."""
    monkeypatch.setattr(module, "_PAUSE", 3)
    for price.seconds, share, found in (
        (1e-4, 0, None),
        (1.0, 20, [0, 1, 0, 1, 0, 1]),
        (0.0095, 0.11, [0, 0, 1, 0, 0, 1]),
        (None, 0, [1, 1, 1, 1]),
    ):
        monkeypatch.setattr(module, "_TRIALS", share)
        depths.clear()
        price.refused, drafting = 0.0, assistant()
        run(llama, assistant=drafting, max_new_tokens=NEW)
        assert 4 <= max(depths) <= 8 if found is None else depths[: len(found)] == found
        # Each refusal is one ask of four forwards'.
        asks = drafting.stats.last.forwards - 2 * depths.count(0)
        assert len(depths) == pytest.approx(asks, abs=2)


def test_close_choices_fork_and_clear_ones_do_not():
    close, clear = (np.log(probs).tolist() for probs in ([0.4, 0.39, 0.2], [0.9, 0.05, 0.04]))
    priors, classes_of = few_bits.EVIDENCE.priors, few_bits.evidence_classes
    first, second = (priors[classes_of(scores, known=True)] for scores in (close, clear))
    assert first[1] > 0.25 > second[1]
    assert second[0] > 0.9 > first[0]
    assert priors[classes_of(close, known=False)] == near([0.37, 0.37, 0.17])
    # Where nothing else may come.
    assert classes_of(close[:1], known=True) == [few_bits.BUCKETS - 1]


# What `fallback="auto"` has besides a table: drafts of the target itself, once they may pay.
LONG = 40


@pytest.fixture
def at_once(monkeypatch):
    """Models are packed when they are first asked for."""
    monkeypatch.setattr(module, "PATIENCE", 0)


@pytest.fixture
def drafted(monkeypatch):
    """How many nodes each draft has."""
    return results_of(monkeypatch, QuantizedSelf, "propose", lambda found, *_: len(found.token_ids))


@pytest.fixture
def packed(monkeypatch):
    """The weights with which each call that was due drafts; None: it does not."""
    return results_of(
        monkeypatch, QuantizedSelf, "_given", lambda found, *_: found and found.weights
    )


@pytest.fixture
def asked(monkeypatch):
    """Whether packing was due, each time that somebody asked."""
    return results_of(monkeypatch, QuantizedSelf, "_is_due")


def automatic(preset=SamAssistant, **options):
    """One whose forwards take so long that any draft pays."""
    return preset(**{"costs": FixedCosts(lambda tokens: 1.0)} | options)


@pytest.mark.parametrize(
    ("preset", "options"), cases(crossed([SamAssistant, remembering], [SAMPLINGS["top"], {}]))
)
@pytest.mark.usefixtures("at_once")
def test_output_of_automatic_drafts_is_plain(preset, options, drafted):
    model, assistant = build(head_dim=16), automatic(preset)
    for seed in range(3):
        same(model, assistant=assistant, seed=seed, max_new_tokens=LONG, **options)
    assert sum(drafted) > LONG
    assert assistant.stats.last.steps < (LONG - 1) / 1.5


def test_weights_are_packed_after_some_asks(packed, asked, drafted, monkeypatch):
    """Those of several calls of a model count together, whatever the assistants."""
    monkeypatch.setattr(module, "PATIENCE", 5)
    run(build(head_dim=16), assistant=automatic(), max_new_tokens=4)
    packed.clear()
    gc.collect()  # copies of other models
    model, known = build(head_dim=16), IN_FOUR_BITS.nbytes()
    for tokens in (4, LONG):
        same(model, assistant=automatic(), max_new_tokens=tokens)
        assert (IN_FOUR_BITS.nbytes() > known) == (tokens == LONG)
    assert asked[-6:] == [False] * 5 + [True]
    assert packed == [FewBits.known_of(model)]
    assert not any(drafted[:5])
    assert any(drafted[5:])
    # Another assistant of the same model waits for nothing.
    packed.clear()
    run(model, assistant=automatic())
    assert packed == [FewBits.known_of(model)]
    packed.clear()
    release_memory(model)
    gc.collect()
    assert FewBits.known_of(model) is None
    assert IN_FOUR_BITS.nbytes() == known


def test_weights_that_change_between_calls_are_packed_after_more_and_more_asks(asked, monkeypatch):
    """A training loop would pack them for each of its calls."""
    monkeypatch.setattr(module, "PATIENCE", 5)
    monkeypatch.setattr(module, "MOST_PATIENCE", 18)
    model, waited = build(head_dim=16), []
    for tokens in (4, LONG, LONG, 4, 4, LONG, LONG):
        asked.clear()
        same(model, assistant=automatic(), max_new_tokens=tokens)
        waited.append(asked.index(True) if asked[-1] else None)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.roll(1, 0))
    assert waited == [None, 5, 10, None, None, 18, 18]


WITHOUT = {
    "no memory": {"extra_memory": 0},
    "less memory than it takes": {"extra_memory": -1},
    "nobody counts": {"budget": 4},
    "a machine without memory": {},
}


@pytest.mark.parametrize("name", cases(WITHOUT))
@pytest.mark.usefixtures("at_once")
def test_nothing_is_packed_where_it_may_not_be(name, drafted, monkeypatch):
    model, options = build(head_dim=16), dict(WITHOUT[name])
    if name == "a machine without memory":
        monkeypatch.setattr(memory, "free_memory", lambda: 0)
    if options.get("extra_memory") == -1:
        options["extra_memory"] += sum(bytes_of(model))
    gc.collect()
    known = IN_FOUR_BITS.nbytes()
    same(model, assistant=automatic(**options), calls=2)
    assert IN_FOUR_BITS.nbytes() == known
    assert not any(drafted)
    same(model, assistant=automatic(extra_memory=sum(bytes_of(model))))
    assert IN_FOUR_BITS.nbytes() > known


def test_it_is_idle_where_it_cannot_draft():
    """Also of a call that nobody generates in."""
    ids, model = np.array([1, 2], np.int32), build(head_dim=16)
    for target in (
        Target(VOCAB),
        Target(VOCAB, model=copy.deepcopy(model).to("meta")),
        Target(VOCAB, model=model),
    ):
        assert module.automatic().start(ids, target).idle
