"""Forwards over rows of different lengths, beside or behind one another, are repeated too."""

import pytest
import torch
from transformers import StoppingCriteria

from hf_retrieval_assist import Assistant, reroute
from hf_retrieval_assist.decoding import selection
from hf_retrieval_assist.engines.cpu.repeated_forward import PROGRAMS, WIDTHS, RepeatedForward
from hf_retrieval_assist.engines.cpu.skinny import PATHS
from tests.support.lossless import build, prompts_of
from tests.support.oracle_drafter import oracle_assistant
from tests.support.quick import cases, crossed
from tests.support.threads import computing_by
from tests.support.watching import a_librarys, results_of

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

# Longer than the windows of tiny models.
LENGTHS = {"even": [11] * 4, "padded": [11, 6, 9, 4]}
NEW = 30
# Whose attention the kernel computes.
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def texts(model, prompts, **options):
    ends = {"pad_token_id": 0, "eos_token_id": 1}
    return model.generate(**prompts, max_new_tokens=NEW, do_sample=False, **ends, **options)


class Ending(StoppingCriteria):
    """Each text ends at another length; texts are known by their prompts."""

    def __init__(self, prompts):
        self.width = prompts.shape[1]
        self.ends = {tuple(ids): 6 * row + 6 for row, ids in enumerate(prompts.tolist())}

    def __call__(self, input_ids, scores, **_):
        ends = [self.ends[tuple(ids[: self.width])] for ids in input_ids.tolist()]
        return input_ids.shape[1] >= self.width + torch.tensor(ends)


@pytest.fixture(autouse=True)
def of_transformers(monkeypatch):
    """The criterion is taken for one that looks at each row alone."""
    monkeypatch.setattr(Ending, "__call__", a_librarys(Ending.__call__))
    monkeypatch.setattr(selection, "ROWWISE", selection.ROWWISE | {Ending})


def ending(model, lengths):
    """Prompts, options by which their rows end at different tokens, and what they then give."""
    model.get_output_embeddings().weight.data[1] = 0  # no text ends by itself
    prompts = prompts_of(lengths, seed=1)
    options = {"stopping_criteria": [Ending(prompts["input_ids"])]}
    with reroute():
        return prompts, options, texts(model, prompts, **options)


def packed_programs(model):
    """Those that are trusted, by the tokens that they are fed."""
    kinds = [kind for kept in PROGRAMS.report(model).idle for kind in kept.kinds.values()]
    return {kind.key[1]: kind for kind in kinds if kind.key[0] == "packed" and kind.trusted}


of_each_kind = pytest.mark.parametrize(
    ("name", "lengths", "dtype"),
    cases(
        crossed(
            ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"],
            LENGTHS.values(),
            [torch.float32, torch.bfloat16],
        ),
        4,
    ),
)


@pytest.mark.parametrize("threads", cases([1, 2, 5]))
@of_each_kind
def test_every_forward_of_rows_that_end_is_repeated(name, lengths, dtype, threads):
    with computing_by(threads):
        model = build(name, **SIZES).to(dtype)
        prompts, options, plain = ending(model, lengths)
        for _ in range(8):
            assistant = Assistant([], budget=0)
            assert torch.equal(texts(model, prompts, assistant=assistant, **options), plain)
    last = assistant.stats.last
    assert last.repeated == last.forwards
    assert last.recordings == 0
    assert last.steps < len(lengths) * last.forwards
    assert packed_programs(model)


@of_each_kind
def test_unequal_drafts_are_repeated_with_the_bits_of_the_model(name, lengths, dtype, monkeypatch):
    """A program that gave other bits would have a fault."""
    model = build(name, **SIZES).to(dtype)
    prompts, options, plain = ending(model, lengths)
    fed = results_of(
        monkeypatch, RepeatedForward, "__call__", lambda _, self, input_ids, **__: input_ids.shape
    )
    for seed in range(12):
        # Seven tokens of a draft at most, however little they are worth.
        drafters = oracle_assistant(plain, prompts["attention_mask"], seed=seed).policy.drafters
        assistant = Assistant(drafters, budget=7, trust_forward=True)
        assert torch.equal(texts(model, prompts, assistant=assistant, **options), plain)
    assert {rows for rows, _ in fed} <= {1, 4}
    assert {tokens for rows, tokens in fed if rows == 1} <= {*WIDTHS}
    assert not PROGRAMS.report(model).faults
    assert len(packed_programs(model)) > 2
    assert assistant.stats.last.repeated > 0
    assert assistant.stats.last.accepted > 0


def test_forwards_whose_attention_no_kernel_computes_are_not_recorded():
    model = build("LlamaForCausalLM", **SIZES | {"head_dim": 8})
    prompts, options, plain = ending(model, LENGTHS["even"])
    for _ in range(6):
        assistant = Assistant([], budget=0)
        assert torch.equal(texts(model, prompts, assistant=assistant, **options), plain)
    faults = PROGRAMS.report(model).faults
    assert {"attention that is not the kernel's" in why for why in faults.values()} == {True}
    assert assistant.stats.last.repeated == 0
