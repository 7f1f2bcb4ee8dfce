"""Tokens of all nodes that are chosen behind a forward, before anybody walks."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_retrieval_assist.decoding import draws
from hf_retrieval_assist.decoding.draws import draws_by_quotients
from hf_retrieval_assist.decoding.selection import TokenSelector
from hf_retrieval_assist.engines.cuda import node_choices
from tests.support.lossless import PROMPT, build, late_token, padded
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import OracleDrafter, agreeing, oracle_assistant, sequences_of
from tests.support.quick import cases, crossed
from tests.support.watching import calls_of

OPTIONS = {
    "all": {"top_k": 0},
    "defaults": {},
    "temperature": {"top_k": 0, "temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 9},
    "top_p": {"top_k": 0, "top_p": 0.8},
    "min_p": {"top_k": 0, "min_p": 0.05},
    "typical": {"top_k": 0, "typical_p": 0.7},
    "epsilon": {"top_k": 0, "epsilon_cutoff": 0.01},
    "eta": {"top_k": 0, "eta_cutoff": 0.02},
    "several": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "repaired": {"remove_invalid_values": True, "renormalize_logits": True},
    "suppressed": {"suppress_tokens": [3, 9, 21, 33]},
    "greedy": {"do_sample": False, "suppress_tokens": [3, 9, 21, 33]},
}


@pytest.fixture(autouse=True)
def static_buffers(monkeypatch):
    serve_in_place(monkeypatch)
    monkeypatch.setattr(TokenSelector, "draw_of_few", lambda *_: None)  # the host reads no logits


@pytest.fixture
def walked(monkeypatch):
    """Calls of the logits processors and the rows that they were for, the prefill's included."""
    return calls_of(monkeypatch, TokenSelector, "process")


def draw_rows(monkeypatch, together):
    """Let numbers of rows be drawn alone, as on a CPU, or together, as on other devices."""

    def tried(device, rows, vocab_size, count):
        right = draws_by_quotients(device, rows, vocab_size, count)
        return right and (count == rows if together else count == 1)

    monkeypatch.setattr(draws, "draws_by_quotients", tried)


def check(model, rows, **options):
    """A call gives plain decoding's tokens and state, with some drafts."""
    options = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0} | options
    _, _, assistant = agreeing(model, padded(rows), tier="tree", seed=4, **options)
    assert assistant.stats.last.keeps_seed


# How many rows, and whether numbers of rows are drawn together.
DRAWN = [(1, False), (3, True), (3, False)]


@pytest.mark.parametrize(
    ("name", "rows", "together"),
    cases([(name, *drawn) for name, drawn in crossed(OPTIONS, DRAWN)], 3),
)
def test_tokens_and_state_are_plain_decodings(name, rows, together, llama, walked, monkeypatch):
    """Recorded, compared and repeated; the walk processes no scores of its own."""
    draw_rows(monkeypatch, together)
    for _ in range(2):
        walked.clear()
        check(llama, rows, **OPTIONS[name])
        # Without a processor there is nothing to be processed.
        assert sum(len(processed) for _, processed, _ in walked) == (0 if name == "all" else rows)


@pytest.mark.parametrize("most", [1 << 24, 150])
def test_rows_that_end_at_unlike_places(most, llama, walked, monkeypatch):
    """Whatever the number of nodes that are processed together."""
    monkeypatch.setattr(node_choices, "_MOST_CELLS", most)
    torch.manual_seed(4)
    free = llama.generate(**padded(3), do_sample=True, max_new_tokens=24)
    ends = [late_token(text[18:], 7) for text in (free[0], free[-1])]
    walked.clear()
    check(llama, 3, eos_token_id=ends)
    assert [len(processed) for _, processed, _ in walked] == [3]


def test_somebody_elses_draws_come_first(llama, walked):
    """Rows that lost their place by a drafter's go on without the seed."""

    def draws(input_ids, scores, **kwargs):
        """Uses the generator between some tokens."""
        if input_ids.shape[1] % 5 == 0:
            torch.rand(3)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    check(llama, 1, stopping_criteria=[draws])
    assert 1 < len(walked) < 24
    options = padded(3) | {"do_sample": True, "max_new_tokens": 24}
    free = llama.generate(**options)
    assistant = oracle_assistant(free, options["attention_mask"], drafter=DrawingOracle)
    assert llama.generate(**options, assistant=assistant).shape == free.shape
    assert not assistant.stats.last.keeps_seed


class DrawingOracle(OracleDrafter):
    """Uses the call's generator itself."""

    def start(self, prompt_ids, target):
        torch.rand(1)
        return super().start(prompt_ids, target)

    def draft(self, coming, budget):
        torch.rand(1)
        return super().draft(coming, budget)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": [lambda ids, scores: scores]},
        {"repetition_penalty": 1.3},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=["custom", "of the text", "scores"],
)
def test_what_needs_more_than_a_nodes_logits_goes_on_as_it_did(options, llama, walked):
    check(llama, 1, **options)
    assert len(walked) == 24


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, walked):
    """The same forwards give the same tokens, whoever processes their scores."""
    model, texts = build(LlamaForCausalLM).to(dtype), []
    for more in ({}, {"return_dict_in_generate": True, "output_scores": True}):
        walked.clear()
        torch.manual_seed(3)
        assistant = oracle_assistant(torch.cat([PROMPT, PROMPT], dim=1))
        options = {"do_sample": True, "max_new_tokens": 14} | more
        texts.append(sequences_of(model.generate(PROMPT, assistant=assistant, **options)))
        assert (len(walked) == 1) is not bool(more)
    assert torch.equal(*texts)


def test_what_is_no_distribution_raises_as_in_plain_decoding():
    """Logits behind the first forward are useless, once it is said so."""
    model, scales, errors = build(), [], []
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits * (scales.pop() if scales else 1.0)
    )
    options = {"do_sample": True, "max_new_tokens": 8}
    assistant = oracle_assistant(torch.cat([PROMPT, PROMPT], dim=1))
    model.generate(PROMPT, **options, assistant=assistant)
    for keyword in ({}, {"assistant": assistant}):
        scales[:] = [torch.nan] * 8 + [1.0]
        with pytest.raises(RuntimeError) as raised:
            model.generate(PROMPT, **options, **keyword)
        assert len(scales) < 8
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
