"""Calls whose output layer is read in eight bits: the same tokens and the same random numbers."""

from functools import partial, wraps

import pytest
import torch
import transformers

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.decoding.selection import TokenSelector
from hf_retrieval_assist.engines.cpu import copies
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.reroute import reroute
from hf_retrieval_assist.engines.cpu.screen import Screen, Screened
from hf_retrieval_assist.engines.cpu.screened import ScreenedVerified, shortlist_of
from hf_retrieval_assist.system import memory
from hf_retrieval_assist.types.row_text import RowText
from hf_retrieval_assist.verification.verified import Verified
from tests.support.callers import Each
from tests.support.copied_models import (
    TOKENS,
    compact_forwards,
    model_of,
    read_at_once,
    watch_screens,
)
from tests.support.logits_feedback import Learner, expected_logits
from tests.support.lossless import NEW_TOKENS, PROMPT, knowing, padded, run, same
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases

SAMPLED = {"do_sample": True}
OPTIONS = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.4},
    "bans": {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [5, 9], [4000]],
        "suppress_tokens": [3, 80],
        "begin_suppress_tokens": [11],
    },
    "bias": {"sequence_bias": {(17,): 4.0, (5, 9): -3.0, (4095,): 2.5}},
    "length": {"min_new_tokens": 9, "eos_token_id": [5, 9, 33, 21, 60, 7, 44]},
    # One token is suppressed that there is not.
    "top-k": {**SAMPLED, "top_k": 30, "temperature": 0.8, "suppress_tokens": [3, TOKENS]},
    "top-k and more": {
        **{**SAMPLED, "top_k": 50, "top_p": 0.8, "typical_p": 0.9, "min_p": 0.01},
        "repetition_penalty": 1.2,
    },
    "hot": {**SAMPLED, "temperature": 1.7},
    "cold": {**SAMPLED, "temperature": 0.1},
    "top-p": {**SAMPLED, "top_p": 0.9, "temperature": 0.8},
    "min-p": {**SAMPLED, "min_p": 0.05},
}
# Choices of which no bound is known, so that all logits are computed.
WHOLE = {
    "temperature": {**SAMPLED, "top_k": 0, "temperature": 1.0},
    "typical": {**SAMPLED, "top_k": 0, "typical_p": 0.9},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
}


@pytest.fixture(autouse=True)
def packed_at_once(monkeypatch):
    read_at_once(monkeypatch)
    monkeypatch.setattr(copies, "MOST_SCREENED", 64)  # and their drafts are wide


@pytest.fixture(scope="module")
def llama():
    return model_of()


def few_drafts(plain):
    """So that forwards of a few widths are many."""
    return knowing(plain, budget=3)


def both(model, **options):
    """A call that has good drafts, equal to plain's in tokens and random state."""
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | options
    with watch_screens() as watch:
        for _ in range(3):
            plain, ours, assistant = agreeing(model, inputs, make=few_drafts, **options)
    if not isinstance(plain, torch.Tensor):
        for found, expected in zip(ours.scores, plain.scores, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert assistant.stats.last.keeps_seed
    assert assistant.stats.last.accepted > 0
    return watch, assistant


@pytest.mark.parametrize("name", cases(OPTIONS, ["greedy", "top-k", "top-p"]))
def test_output_is_plain(llama, name):
    watch, assistant = both(llama, **OPTIONS[name])
    assert watch.screened >= assistant.stats.last.repeated > 0
    assert watch.whole == 0


@pytest.mark.parametrize("broken", [False, True])
def test_whether_a_screened_forward_is_sound_is_told_by_its_screen(broken):
    """What stands for its logits may be anything."""
    weight, x = torch.randn(300, 8), torch.randn(2, 8)
    x[1, 3] = torch.nan if broken else 1.0
    screened = Screened(Screen(weight, QuantizedWeight.pack(weight)), x)
    logits = torch.full((1, 2, 300), 0.0 if broken else torch.nan)
    verified = ScreenedVerified(Verified(logits, [0], None), screened)
    assert verified.is_sound != broken


@pytest.mark.parametrize("name", WHOLE)
def test_all_logits_where_they_are_needed(llama, name):
    watch, _ = both(llama, **WHOLE[name])
    assert watch.screened == 0


@pytest.mark.parametrize("name", cases(["top-k", "greedy", "hot", "top-p"], 2))
def test_batches(llama, name):
    """Rows with padding that get on unequally and end early."""
    options = {"do_sample": False, "max_new_tokens": 20} | OPTIONS[name]
    torch.manual_seed(3)
    free = llama.generate(**padded(4), **options)
    options["eos_token_id"] = [int(free[0, 18 + 7]), int(free[2, 18 + 15])]
    with watch_screens() as watch:
        for _ in range(3):
            agreeing(llama, padded(4), seed=3, make=lambda _: SamAssistant(budget=4), **options)
    assert watch.screened > 0


def test_half_precision_rounds_as_plain_decoding_by_the_kernels():
    model = model_of().bfloat16()
    with reroute():
        plain = run(model)
    with watch_screens() as watch:
        for _ in range(3):
            ours = run(model, assistant=few_drafts(plain))
    assert torch.equal(ours, plain)
    assert watch.screened > 0


@pytest.mark.parametrize(
    ("dtype", "rows", "name"),
    [
        (torch.float32, 1, "greedy"),
        (torch.bfloat16, 1, "hot"),
        (torch.float32, 3, "top-k"),
        (torch.bfloat16, 3, "greedy"),
    ],
)
def test_a_drafter_that_asks_for_all_logits_gets_those_of_the_model(dtype, rows, name):
    """In forwards that are repeated, and would be screened for the tokens alone."""
    model, options = model_of(head_dim=16).to(dtype), {"do_sample": False} | OPTIONS[name]
    # Short ones, whose products are the kernel's, so that they have the bits of each alone.
    prompts = torch.cat([PROMPT, PROMPT.flip(1), PROMPT + 3])[:rows, :5]
    for _ in range(3):
        with reroute():
            plain = run(model, prompts, **options)
        learner = Learner(plain.tolist())
        assistant = Assistant([learner], budget=4)
        assert torch.equal(run(model, prompts, **options, assistant=assistant), plain)
    with reroute(verifying=True):
        expected = expected_logits(model, learner, prompts.shape[1])
    assert assistant.stats.last.repeated > 0
    assert len(expected) > 5
    # PyTorch's functions of single float32 numbers round by where they stand.
    bound = 1e-4 if dtype is torch.float32 else 0.0
    for (_, shown), logits in zip(learner.shown, expected, strict=True):
        torch.testing.assert_close(shown.logits, logits, rtol=bound, atol=bound)


class Suppressing(transformers.LlamaForCausalLM):
    """Changes logits in place."""

    @wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        with torch.no_grad():
            output.logits[..., 100:].sub_(3.0)
        return output


def hooked():
    model = model_of()
    model.lm_head.register_forward_hook(lambda layer, args, output: output * -1)
    return model


CHANGED = {
    "in place": partial(model_of, Suppressing),
    "scaled and capped": partial(
        model_of, transformers.Gemma3ForCausalLM, final_logit_softcapping=5.0
    ),
    "by a hook": hooked,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGED)
def test_logits_that_a_model_changes(name, mode):
    with mode():
        watch, _ = both(CHANGED[name]())
    assert watch.screened == 0


def test_free_memory(tmp_path, monkeypatch):
    """What the machine has, and what is left of its groups' limits."""

    def write(folder, most, current):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        return memory.free_memory()

    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_GROUP", tmp_path / "own")
    assert memory.free_memory() == 0
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable:  500 kB\n")
    assert write(tmp_path, "max", 100_000) == 500 << 10
    assert write(tmp_path, 300_000, 100_000) == 200_000
    assert memory.may_take(25_000, None)
    assert not memory.may_take(25_001, None)
    # A service is in groups within groups.
    (tmp_path / "own").write_text("1:name=x:/other\n0::/system.slice/one.service\n")
    assert memory.free_memory() == 200_000
    assert write(tmp_path / "system.slice" / "one.service", 90_000, 10_000) == 80_000


class Own(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


ROWS = [RowText(0, torch.tensor([1, 2]), 4)]
WARM, TOP = transformers.TemperatureLogitsWarper(0.5), transformers.TopKLogitsWarper(20)
NUCLEUS = transformers.TopPLogitsWarper(0.9)


@pytest.mark.parametrize(
    ("processors", "draws", "shortlist"),
    [
        ([], True, 0),
        ([WARM, NUCLEUS], True, 0),
        ([WARM, transformers.TypicalLogitsWarper(0.9)], True, 0),
        ([WARM, TOP, NUCLEUS], True, 20),
        ([WARM, TOP], True, 20),
        ([NUCLEUS, TOP], True, 0),
        ([WARM, TOP, Own()], True, 0),
        ([], False, 1),
        ([Own()], False, 0),
    ],
)
def test_processors_by_which_tokens_are_chosen(processors, draws, shortlist):
    """What is not known leaves nothing out."""
    select = TokenSelector(transformers.LogitsProcessorList(processors), draws, ROWS)
    assert shortlist_of(select) == shortlist


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_a_weight_that_is_changed_within_a_call_is_read(said, logits):
    """Nothing of the call reads a copy from then on, in eight bits or in bfloat16."""
    llama, start = model_of(), PROMPT.shape[1]
    with torch.no_grad():
        llama.lm_head.weight.copy_(llama.lm_head.weight.bfloat16())

    @torch.no_grad()
    def act(length):
        if length in (start + 8, start + 17):
            llama.lm_head.weight.neg_()
            if said:
                SamAssistant.model_changed()

    options = {"max_new_tokens": 24, "stopping_criteria": [Each(act)]}
    if logits:
        options |= {"output_logits": True, "return_dict_in_generate": True}
    with watch_screens() as watch, compact_forwards() as compact:
        for _ in range(4):
            same(llama, assistant=SamAssistant(budget=0), **options)
    assert compact if logits else watch.screened
