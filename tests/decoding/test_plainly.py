"""Calls that transformers' own loop decodes: those that rest from drafting, and others."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers

from hf_retrieval_assist import OutputMemory, SamAssistant, attach
from hf_retrieval_assist.decoding.call import cost_key
from hf_retrieval_assist.host.transformers_private import compilations
from hf_retrieval_assist.papers import SamDecoding
from hf_retrieval_assist.policy.account import Account
from hf_retrieval_assist.policy.policy import AssistantSession
from tests.support.lossless import build, static
from tests.support.parts import needs
from tests.support.quick import cases, crossed
from tests.support.watching import calls_of
from tests.support.wrapped_models import RUNTIMES

PROMPTS = torch.tensor([[0, 0, 5, 9, 33, 21, 60, 7], [44, 9, 33, 12, 18, 50, 9, 33]])
MASK = (PROMPTS > 0).long()


@pytest.fixture
def resting(monkeypatch):
    monkeypatch.setattr(Account, "rests", lambda self: True)


def run(model, prompts=PROMPTS, mask=MASK, **options):
    transformers.set_seed(3)
    options = {"max_new_tokens": 24, "do_sample": False} | options
    return model.generate(prompts, attention_mask=mask, **options)


@pytest.mark.parametrize("sample", [False, True])
def test_a_call_at_rest_is_plain_and_counted(model, resting, sample):
    assistant = SamAssistant()
    options = {"do_sample": sample, "temperature": 1.3 if sample else None}
    assert torch.equal(run(model, **options), run(model, **options, assistant=assistant))
    total = assistant.stats.total
    assert (total.tier, total.drafted, total.tokens) == ("at rest", 0, 48)
    assert (total.steps, total.forwards, total.mean_accepted_tokens) == (46, 23, 1.0)
    assert 0 < total.seconds["forward"] < total.seconds["total"]


@pytest.fixture
def texts(model):
    """The rows' new tokens, one that ends the first row early, and those of each row up to it."""
    free = run(model)[:, PROMPTS.shape[1] :].tolist()
    end = free[0][5]
    return free, end, [row[: row.index(end) + 1] if end in row else row for row in free]


@pytest.fixture
def learnt(monkeypatch):
    """What sessions are told of calls at rest, and the texts."""
    return calls_of(monkeypatch, AssistantSession, "learn_plain")


@pytest.mark.parametrize("padded_with_the_end", [False, True])
def test_its_texts_are_learnt_up_to_their_ends(model, resting, texts, learnt, padded_with_the_end):
    _, end, ended = texts
    pad = end if padded_with_the_end else 0
    run(model, eos_token_id=end, pad_token_id=pad, assistant=SamAssistant())
    assert [ids for _, ids in learnt] == ended
    assert len(ended[0]) < 24


@pytest.mark.parametrize("by_its_end", [False, True])
def test_padding_behind_another_criterions_end_is_not_learnt(
    model, resting, texts, learnt, by_its_end
):
    def first_row_ends(ids, scores, **kwargs):
        return torch.tensor([ids.shape[1] >= PROMPTS.shape[1] + 4, False])

    free, _, _ = texts
    pad = free[0][3] if by_its_end else 0
    options = {"eos_token_id": 66, "pad_token_id": pad, "stopping_criteria": [first_row_ends]}
    run(model, **options, assistant=SamAssistant())
    assert [ids for _, ids in learnt] == [free[0][:4], free[1]]


@pytest.mark.parametrize("private", [False, True])
def test_a_memory_learns_what_is_not_private(model, resting, private):
    memory = OutputMemory()
    assistant = SamAssistant(memory=memory)
    run(model, assistant=assistant.private() if private else assistant)
    assert len(memory) == (0 if private else 2)


@pytest.mark.parametrize("tier", ["at rest", "plain"])
def test_rows_count_up_to_their_ends_as_drafted_ones_do(model, resting, texts, tier):
    _, end, ended = texts
    lengths = [len(row) for row in ended]
    assert min(lengths) < max(lengths)
    assistant, drafted = SamAssistant(), SamAssistant(budget=0)
    run(model, eos_token_id=end, assistant=assistant, use_cache=tier != "plain")
    run(model, eos_token_id=end, assistant=drafted)
    last, other = assistant.stats.last, drafted.stats.last
    assert (last.tier, other.tier) == (tier, "tree")
    assert last.tokens == other.tokens == sum(lengths)
    assert last.steps == other.steps == sum(lengths) - len(lengths)
    assert last.forwards == other.forwards == max(lengths) - 1


@needs("extensions/record")
def test_plain_calls_are_recorded_up_to_their_rows_ends(model, texts):
    _, end, ended = texts
    assistant = SamAssistant()
    with assistant.record() as record:
        run(model, eos_token_id=end, use_cache=False, assistant=assistant)
    call = record.calls[0]
    assert call.stats.tier == "plain"
    assert [call.generated(row).tolist() for row in range(len(ended))] == ended


ASKING = {
    "fixed": SamAssistant(budget=8),
    "paper": SamDecoding(),
    "expecting": SamAssistant().expecting([3, 4, 5]),
    "recording": SamAssistant(),
}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in ASKING if name != "recording"),
        pytest.param("recording", marks=needs("extensions/record")),
    ],
)
def test_who_asked_for_drafts_gets_them(model, resting, name):
    assistant = ASKING[name]
    with assistant.record() if name == "recording" else nullcontext():
        run(model, assistant=assistant)
    assert assistant.stats.total.tier == "tree"


@needs("engines/cpu")
def test_calls_of_both_kinds_are_timed(model):
    assistant = SamAssistant()
    account = assistant.policy.account(cost_key(model, PROMPTS))
    for _ in range(5):
        run(model, max_new_tokens=40, assistant=assistant)
    account._rests = 1
    run(model, max_new_tokens=40, assistant=assistant)
    assert account._drafted.seconds > 0
    assert account._plain[True].seconds > 0


@needs("engines/cpu")
def test_a_call_of_one_token_says_nothing_of_the_next_ones(model, monkeypatch):
    """Of its forwards none is repeated, for there is none."""
    assistant = SamAssistant()
    for new_tokens in (40, 40, 40, 1, 40):
        run(model, max_new_tokens=new_tokens, assistant=assistant)
    counted = calls_of(monkeypatch, Account, "count_drafted")
    run(model, max_new_tokens=1, assistant=assistant)
    ((_, _, tokens, plain_step, _),) = counted
    assert (tokens, plain_step) == (0, None)


def test_a_compiled_call_at_rest_runs_what_plain_decoding_compiles(resting):
    model, options = build(num_hidden_layers=1), static(max_new_tokens=40)
    plain, compiled = run(model, **options), compilations()
    assistant = SamAssistant()
    for _ in range(2):
        assert torch.equal(plain, run(model, **options, assistant=assistant))
    assert assistant.stats.last.tier == "at rest"
    # Its own code, not one more.
    assert compilations() == compiled > 0


def test_compiled_calls_are_measured_against_compiled_plain_ones(monkeypatch):
    torch._dynamo.reset()
    model, options = build(num_hidden_layers=1), static(max_new_tokens=40)
    assistant, pace = SamAssistant(), []
    account = assistant.policy.account(replace(cost_key(model, PROMPTS), cost_variant="compiled"))
    eager = assistant.policy.account(cost_key(model, PROMPTS))
    count = Account.count_plain
    monkeypatch.setattr(
        Account, "count_plain", lambda *told: pace.append((*told[2:], count(*told)))
    )
    for rests in (1, 2):
        account._rests = 1
        run(model, **options, assistant=assistant)
        # The first one compiled the code, which says nothing of later ones.
        assert len(pace) == rests - 1
        assert assistant.stats.last.tier == "at rest"
    assert pace == [(39, False, None)]  # no kernels but its own compute
    assert account._plain[False].seconds > 0
    counted = []
    monkeypatch.setattr(Account, "count_drafted", lambda *told: counted.append(told[0]))
    before = compilations()
    for _ in range(3):
        run(model, **options, assistant=assistant)
    assert compilations() == before
    assert counted == [account] * 3
    assert not eager._calls


@pytest.mark.parametrize("graphs", cases([True, False]))
def test_calls_whose_forwards_are_repeated_are_not_tried_plainly(graphs, monkeypatch):
    """Whatever drafts cost there."""
    # Its drafts have few widths, which are recorded soon.
    assistant = SamAssistant(fallback="logit_ngrams", graphs=graphs)
    model, tried = build(), []
    monkeypatch.setattr(Account, "count_drafted", lambda *told: tried.append(told[3]))
    for number in range(12):  # each width is recorded when it has come some times
        run(model, max_new_tokens=40, assistant=assistant)
        last = assistant.stats.last
        if number >= 2 and 2 * last.repeated > last.forwards:
            break
    assert (2 * last.repeated > last.forwards) == graphs
    assert (tried[-1] is None) == graphs


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_cache": False}, "use_cache is False; set it to True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "pass one row at a time"),
        ({}, "; call model.eval()"),  # the model is in train mode
    ],
)
def test_a_call_that_cannot_be_assisted_says_so_once(told, options, why):
    model, assistant = build(), SamAssistant()
    if not options:
        model.train().config.attention_dropout = 0.3
    for _ in range(2):
        run(model, assistant=assistant, **options)
    (said,) = [text for text in told.messages if "cannot draft here: " in text]
    assert why in said
    assert options or len(told.messages) == 1
    assert assistant.stats.last.summary.startswith(f"not assisted ({assistant.stats.last.reason})")


def test_most_calls_at_rest_are_told_of_once(model, told, monkeypatch):
    assistant = SamAssistant()
    run(model, assistant=assistant, max_new_tokens=2)
    told.clear()
    monkeypatch.setattr(Account, "rests", lambda self: True)
    for _ in range(20):
        run(model, assistant=assistant, max_new_tokens=2)
        assert len(told.messages) == (assistant.stats.total.rests > 16)
    assert "most calls are decoded plainly" in told.text
    assert "20 of 21 calls rested" in assistant.stats.total.summary


def test_the_log_is_as_loud_as_transformers(model, told):
    transformers.logging.set_verbosity_error()
    run(model, assistant=SamAssistant(), use_cache=False)
    assert not told.messages
    transformers.logging.set_verbosity_info()
    run(model.to(torch.float64), assistant=SamAssistant())
    model.to(torch.float32)
    assert "LlamaForCausalLM: tree (" in told.text


def test_the_first_call_of_a_model_says_what_takes_its_time(told):
    fresh = build()
    assistant = SamAssistant()
    for _ in range(2):
        run(fresh, assistant=assistant)
    (said,) = told.messages
    assert said.startswith("LlamaForCausalLM: the first call with an assistant tests how drafts")
    assert 0 < assistant.stats.last.seconds["test"] < assistant.stats.total.seconds["test"]
    assert " (ms: test " in str(assistant.stats.last)


@pytest.mark.parametrize(
    ("kind", "sample", "keyword"),
    cases(crossed(RUNTIMES, [False, True], ["assistant", "custom_generate"]), 3),
)
def test_a_runtime_that_is_no_module_is_decoded_plainly(llama, told, kind, sample, keyword):
    runtime, assistant = kind(llama), SamAssistant()
    plain = run(llama, do_sample=sample)
    assert torch.equal(plain, run(runtime, do_sample=sample))
    assert torch.equal(plain, run(runtime, do_sample=sample, **{keyword: assistant}))
    assert assistant.stats.last.tier == "plain"
    assert f"{kind.__name__}: the assistant cannot draft here: it is no torch module" in told.text
    with pytest.raises(TypeError, match="model: expected a transformers model"):
        attach(runtime, assistant)


def test_a_plain_model_is_not_asked_where_it_wants_its_inputs(monkeypatch):
    """One with parts in train mode that drop out, whose embeddings nobody can name."""
    model = build(attention_dropout=0.5).train()
    monkeypatch.setattr(model, "get_input_embeddings", lambda: 1 / 0)
    assistant = SamAssistant()
    outputs = []
    for named in ({}, {"assistant": assistant}):
        torch.manual_seed(0)
        outputs.append(run(model, **named))
    assert torch.equal(*outputs)
    assert assistant.stats.last.tier == "plain"
