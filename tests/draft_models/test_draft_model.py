import copy

import numpy as np
import pytest
import torch

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.assistants import Assistant
from hf_retrieval_assist.decoding import draws
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.policy.cost_store import CostModels
from tests.support.lossless import INPUTS, PHRASE, PROMPT, build, disturbed, run, same
from tests.support.one_text import OneText
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases, crossed

VOCAB = 48


def llama():
    model = build(vocab_size=VOCAB, num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight *= 20  # decided, so that rounding cannot reorder the candidates
    return model


def gemma():
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "sliding_window": 4}
    return build("Gemma3ForCausalLM", layer_types=kinds, **sizes)


@pytest.fixture(scope="module", params=[llama, gemma], ids=["llama", "gemma"])
def model(request):
    return request.param()


def next_logits(model, text):
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, -1]


def start(drafter, prompt, vocab_size=VOCAB):
    return OneText(drafter, prompt, Target(vocab_size))


def test_drafts_are_the_models_best_candidates_as_the_text_goes_on(model):
    session = start(DraftModelDrafter(model, max_nodes=12, max_levels=5, width=3), [3, 1, 4, 1, 5])
    text = [3, 1, 4, 1, 5]
    rng = np.random.default_rng(0)
    for _ in range(8):
        tree = session.propose(12)
        assert len(tree) == 12
        assert tree.fault(1 << 30, 1 << 30) is None
        # Every node is the candidate of its rank in a forward over the text and its path.
        for node, rank in enumerate(session.shape.ranks[: len(tree)]):
            above = tree.token_ids[tree.path(node)[:-1]].tolist()
            assert tree.token_ids[node] == next_logits(model, text + above).topk(8).indices[rank]
        # The text follows the draft for a while, then leaves it.
        node = int(rng.integers(-1, len(tree)))
        new = [*tree.token_ids[tree.path(node)].tolist(), int(rng.integers(VOCAB))]
        session.commit(new, None)
        text += new


def test_measures_which_ranks_are_accepted():
    model = llama()
    drafter = DraftModelDrafter(model, max_nodes=8, max_levels=2, width=4)
    text = [1, 2, 3]
    session = start(drafter, text)
    for _ in range(40):
        second = int(next_logits(model, text).topk(2).indices[1])
        session.propose(8)
        session.commit([second], None)
        text.append(second)
    vector = drafter.chooser("").counts.vector
    assert vector[1] > 0.8
    assert drafter.chooser("other").counts.vector[1] < 0.5


def test_a_draft_model_as_large_as_the_target_is_not_asked():
    """Its first draft alone would cost more than many steps."""
    model = llama()
    twin, fed = copy.deepcopy(model), []
    twin.register_forward_hook(lambda *_: fed.append(1))
    prompt = torch.arange(1, 9)[None]
    for budget, drafts in (("auto", False), (8, True)):
        assistant = SamAssistant(fallback=twin, budget=budget, costs=CostModels())
        model.generate(prompt, assistant=assistant, do_sample=False, max_new_tokens=20)
        fed.clear()  # what tells whether it can be fed trees has run it
        model.generate(prompt, assistant=assistant, do_sample=False, max_new_tokens=20)
        assert bool(fed) == drafts


FORESEEN = [
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {},
    {"temperature": 1.5},
]


@pytest.mark.parametrize("options", cases(FORESEEN))
def test_drafts_of_a_sampled_text_are_what_will_be_drawn(monkeypatch, options):
    """More is accepted than of the most probable tokens; the text is plain's either way."""
    steps, target = {}, build()
    options = {"do_sample": True, "max_new_tokens": 40, **options}
    for foreseen in (True, False):
        if not foreseen:
            monkeypatch.setattr(draws, "draws_by_quotients", lambda *key: False)
        steps[foreseen] = 0
        for seed in range(2):
            assistant = Assistant([DraftModelDrafter(disturbed(target))], budget=8)
            given = target, {"input_ids": PROMPT}
            agreeing(*given, seed=seed, make=lambda plain, made=assistant: made, **options)
            assert assistant.stats.last.keeps_seed
            steps[foreseen] += assistant.stats.last.steps
    assert steps[True] < 0.8 * steps[False]


def test_rows_of_a_sampled_batch_that_have_ended_are_not_foreseen():
    target = build()
    prompts = torch.tensor([[5, 6, 7], [9, 3, 1], [4, 4, 2]])
    options = {"do_sample": True, "max_new_tokens": 24}
    # The first row ends soon.
    ending = int(run(target, prompts, **options)[0, 6])
    drafting = Assistant([DraftModelDrafter(target)], budget=8)
    plain, _, _ = same(target, prompts, drafting, eos_token_id=ending, pad_token_id=0, **options)
    ends = (plain[:, 3:] == ending).int().argmax(dim=1).tolist()
    assert 0 < ends[0] < 5
    assert plain.shape[1] > 12
    assert drafting.stats.last.keeps_seed


TABLES = {
    "GPT2LMHeadModel": {"n_positions": 32},
    "OPTForCausalLM": {"max_position_embeddings": 32},
    "RobertaForCausalLM": {"max_position_embeddings": 33},
    "GPTJForCausalLM": {"n_positions": 32},
}


@pytest.mark.parametrize(("draft_class", "rows"), cases(crossed(TABLES, [1, 2]), 2))
def test_drafts_end_at_the_draft_models_table_of_positions(draft_class, rows):
    target = build()
    draft = build(draft_class, **TABLES[draft_class])
    drafter = DraftModelDrafter(draft, max_nodes=4, max_levels=2)
    assert drafter.positions == 32
    assistant = Assistant([drafter], budget=4)
    ids = PROMPT.repeat(rows, 1) + torch.arange(rows)[:, None]
    assert torch.equal(run(target, ids), run(target, ids, assistant=assistant))
    assert assistant.stats.last.drafted
    # A level is fed behind the text: what a table holds is used to its end.
    for length, drafted in ((31, True), (32, False)):
        session = start(drafter, (PHRASE * 5)[:length], target.config.vocab_size)
        assert bool(len(session.propose(4))) == drafted


@pytest.mark.parametrize(("rows", "size"), cases(crossed(["one row", "padded"], [40, 80]), 2))
def test_tables_of_one_tokenizer_may_differ_by_rows_that_fill_them_up(rows, size):
    """A draft model lacks the target's last ids, or has more; the drafts have what both have."""
    target, draft_model = build(), build(vocab_size=size)
    with torch.no_grad():
        draft_model.lm_head.weight[-1] = 100  # its own favourite
    for options in ({}, {"do_sample": True, "seed": 3}):
        assistant = Assistant([DraftModelDrafter(draft_model, width=2)], budget=6)
        same(target, INPUTS[rows]["input_ids"], assistant=assistant, **options)
        assert assistant.stats.last.drafted


def test_a_draw_of_another_vocabulary_is_refused():
    drafter = DraftModelDrafter(build(vocab_size=68), temperature=1.0)
    with pytest.raises(ValueError, match="vocabulary of 67 ids"):
        drafter.start(np.zeros(3, np.int32), Target(67))
