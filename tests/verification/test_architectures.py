"""Every causal language model of transformers: assisted output equals plain output."""

import re

import pytest
import torch
import transformers

from hf_retrieval_assist.cache.kv_cache import SlotCache
from hf_retrieval_assist.cache.slot_layers import HybridSlotLayer, IndexedSlotLayer
from hf_retrieval_assist.engines.cuda.fixed_verifier import FixedVerifier
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from tests.support import architectures as classes
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases
from tests.support.tiny_models import tiny_config, tiny_model
from tests.support.watching import calls_of

# Longer than the windows and chunks of the tiny models.
PROMPT = torch.tensor([[5, 9, 33, 21, 60, 7, 44, 9, 33, 12, 18, 50, 3, 29]])
NEW_TOKENS = 14
TIERS = ("tree", "chain", "replay", "plain")

# The table is of one version; others have fewer classes, and serve some of them at lower tiers.
TABLED = (
    re.findall(r"transformers (\d+\.\d+\.\d+)", classes.TABLE.read_text())[0]
    == transformers.__version__
)
with_table = pytest.mark.skipif(not TABLED, reason="the table is of another transformers version")

# XLM puts out NaN once its positions exceed the padding index, with or without an assistant.
LOOSE = {"XLMWithLMHeadModel"}

# Forwards whose routing of experts asks the device for numbers, or takes them for granted.
UNRECORDED = {
    "DbrxForCausalLM": "waits for the device",
    "JetMoeForCausalLM": "of their spread",
    "LongcatFlashForCausalLM": "waits for the device",
}


@pytest.fixture(scope="module")
def served():
    """Tier of one row, tier of a batch, and why not higher: by class, as the table shows them."""
    return classes.tabled()


def assert_near(plain, assisted):
    """Both results' logits, in units of their spread."""
    for expected, actual in zip(plain.logits, assisted.logits, strict=True):
        finite = expected.isfinite()
        assert torch.equal(finite, actual.isfinite())
        error = (expected - actual)[finite].abs().max() / expected[finite].std()
        assert error < 1e-3


# One class of each way in which classes are served, or are not; `make test-sweep` tries all.
QUICK = {
    *("LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"),
    *("Gemma3nForCausalLM", "DoryForCausalLM"),
    *("DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "Llama4ForCausalLM", "OPTForCausalLM"),
    *("GitForCausalLM", "InklingForCausalLM", "Lfm2ForCausalLM", "BartForCausalLM"),
    *("BloomForCausalLM", "GPTNeoForCausalLM", "BambaForCausalLM", "Mamba2ForCausalLM"),
    *("Qwen3NextForCausalLM", "DeepseekV4ForCausalLM", "CpmAntForCausalLM", "MambaForCausalLM"),
    *("MiniMaxForCausalLM", "RwkvForCausalLM", "RecurrentGemmaForCausalLM", "Zamba2ForCausalLM"),
}


def quick(names, chosen=QUICK):
    """Other releases of transformers have other classes."""
    return cases(names, chosen & {*names})


@pytest.mark.parametrize("name", quick(classes.architectures()))
def test_class_generates_as_without_assistant(name, served):
    model = classes.build(name)
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    length = {"max_new_tokens": NEW_TOKENS}

    *_, assistant = agreeing(model, inputs, do_sample=False, **length)
    if TABLED:
        assert assistant.stats.last.tier == served[name][0]
    if assistant.stats.last.tier != "plain":
        assert assistant.stats.last.accepted > 0

    outputs = {"return_dict_in_generate": True, "output_logits": True}
    plain, assisted, _ = agreeing(model, inputs, seed=1, do_sample=True, **length, **outputs)
    if name not in LOOSE:
        assert_near(plain, assisted)


def padded_batch():
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(prompts)
    mask[1, :5] = prompts[1, :5] = 0
    return {"input_ids": prompts, "attention_mask": mask}


# Rows behind one another in one forward, of chunks and of rotary positions of a part.
@pytest.mark.parametrize(
    "name", quick(classes.architectures(), {"Llama4ForCausalLM", "GPTNeoXForCausalLM"})
)
def test_class_generates_padded_batches_as_without_assistant(name, served):
    inputs = padded_batch()
    length = {"max_new_tokens": NEW_TOKENS}
    *_, assistant = agreeing(classes.build(name), inputs, do_sample=False, **length)
    if TABLED:
        assert assistant.stats.last.tier == served[name][1]


# Classes of which transformers makes no dynamic frequencies, or none of so few dimensions.
FIXED_ROPE = {
    *("GPTNeoXForCausalLM", "MiniMaxForCausalLM", "MixtralForCausalLM", "PhimoeForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("RecurrentGemmaForCausalLM", "StableLmForCausalLM"),
}


def with_near_thresholds(name):
    """A model of a class whose frequencies or choice of keys change within the text; None: nothing
    of the kind is known of the class."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class)
    text, changed = config.get_text_config(decoder=True), False
    rope = getattr(text, "rope_parameters", None)
    if hasattr(text, "index_topk"):
        # Few heads make many scores exactly 0, and which of equal ones are kept is no rule.
        text.index_topk, text.index_n_heads, changed = 16, 16, True
    elif name not in FIXED_ROPE and isinstance(rope, dict) and rope.get("rope_type") == "default":
        text.rope_parameters = rope | {"rope_type": "dynamic", "factor": 2.0}
        text.max_position_embeddings, changed = 24, True
    return tiny_model(model_class, config) if changed else None


# A row that ends at its threshold, and a batch whose rows cross it one after another.
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "name", quick(classes.architectures(), {"LlamaForCausalLM", "GlmMoeDsaForCausalLM"})
)
def test_class_generates_past_its_thresholds(name, rows):
    model = with_near_thresholds(name)
    if model is None:
        pytest.skip("no such threshold")
    single = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    inputs = single if rows == 1 else padded_batch()
    plain, assisted, _ = agreeing(model, inputs, **options, max_new_tokens=24)
    assert_near(plain, assisted)


# Chunks, which begin behind the padding.
@pytest.mark.parametrize("name", quick(classes.architectures(), {"Llama4ForCausalLM"}))
def test_class_is_served_from_recordings(name, served, monkeypatch):
    """Padded batches in static buffers, a recorder standing where CUDA graphs are."""
    if served.get(name, ("", ""))[1] != "tree":
        pytest.skip("no trees, so nothing is recorded")
    serve_in_place(monkeypatch)
    model, finished = classes.build(name), calls_of(monkeypatch, FixedVerifier, "end")
    for _ in range(2):
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        *_, assistant = agreeing(model, padded_batch(), **options)
    if TABLED:
        assert assistant.stats.last.tier == "tree"
    # Layers that keep more than keys and values stay as they are.
    more = IndexedSlotLayer, HybridSlotLayer
    simple = not any(isinstance(layer, more) for layer in SlotCache(model.config).layers)
    assert bool(finished) == simple
    recorded = WORKSPACES.report(model)
    fault = next(iter(recorded.faults.values()), "")
    assert UNRECORDED.get(name, "") in fault
    assert bool(fault) == (name in UNRECORDED)
    if simple and name not in UNRECORDED:
        steps = recorded.idle[-1].kinds.values()
        assert any(step.trusted for step in steps)
        assert all(step.fault is None for step in steps)


def hybrids():
    """Classes with a recurrent state."""
    known = classes.known_tiers()
    return [
        n
        for n in classes.architectures()
        if known.get(n) == "replay" and n not in classes.BELOW_KNOWN
    ]


@pytest.mark.parametrize("name", quick(hybrids(), {"Mamba2ForCausalLM", "Qwen3NextForCausalLM"}))
def test_hybrids_take_fewer_forwards(name):
    """One row, greedy and sampled, drafts being right but for every tenth token; rows of a batch
    would only go back together, and are decoded plainly."""
    prompts = torch.cat([PROMPT, PROMPT.flip(1), PROMPT.roll(3)])
    model, length = classes.build(name), {"max_new_tokens": 32, "eos_token_id": None}
    for rows, do_sample in ((1, False), (1, True), (3, False)):
        inputs = {"input_ids": prompts[:rows], "attention_mask": torch.ones_like(prompts[:rows])}
        *_, assistant = agreeing(model, inputs, do_sample=do_sample, **length)
        last = assistant.stats.last
        assert last.tier == ("replay" if rows == 1 else "plain")
        assert last.keeps_seed
        assert last.forwards < 28 or rows > 1


@with_table
def test_table_lists_every_class(served):
    assert sorted(served) == classes.architectures()
    text = classes.TABLE.read_text()
    assert all(name in text for name in classes.SKIPPED)


@with_table
def test_no_class_is_served_below_its_known_tier_without_a_reason(served):
    known = classes.known_tiers()
    lower = {
        name
        for name, (tier, *_) in served.items()
        if TIERS.index(tier) > TIERS.index(known.get(name, "plain"))
    }
    assert lower == set(classes.BELOW_KNOWN)
