"""Retrieved drafts in transformers' own assisted loop."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_retrieval_assist import Assistant, OutputMemory, RetrievalCandidateGenerator
from hf_retrieval_assist.drafters.base import Target
from tests.support.memories import remembering

from .support.lossless import NEW_TOKENS, build, run
from .support.oracle_drafter import OracleDrafter, oracle_assistant
from .support.watching import fed_shapes

PROMPT = torch.tensor([[5, 9, 33, 21, 60, 7, 44]])


class RetrievalLlama(LlamaForCausalLM):
    generator: RetrievalCandidateGenerator

    def _get_candidate_generator(self, *args, **kwargs):
        return self.generator


@pytest.fixture(scope="module")
def model():
    return build(RetrievalLlama)


def test_loop_gives_the_same_tokens_in_fewer_forwards(model):
    plain = run(model, PROMPT)
    model.generator = RetrievalCandidateGenerator.for_model(oracle_assistant(plain), model, 37)
    with fed_shapes(model) as shapes:
        assert torch.equal(plain, run(model, PROMPT, prompt_lookup_num_tokens=1))
    assert len(shapes) < NEW_TOKENS


def test_drafts_stay_below_the_length_limit():
    text = [*PROMPT[0].tolist(), *range(20)]
    drafter = OracleDrafter([text], miss=0.0, depth=12, seed=1)
    generator = RetrievalCandidateGenerator(Assistant([drafter], budget=64), Target(67), 10)
    for _ in range(5):
        assert generator.get_candidates(PROMPT)[0].shape[1] < 10


def test_models_do_not_draft_from_each_others_texts(model):
    other = build(RetrievalLlama, vocab_size=80)
    text = [*PROMPT[0].tolist(), 3, 8, 12]
    memory = OutputMemory()
    first, second = (
        RetrievalCandidateGenerator.for_model(remembering(memory, fallback=None), m)
        for m in (model, other)
    )
    first.get_candidates(PROMPT)
    first.update_candidate_strategy(torch.tensor([text]), None, 1)
    first.close()
    fresh = torch.tensor([[44, 3, 8]])
    assert second.get_candidates(fresh)[0].tolist() == fresh.tolist()
    again = RetrievalCandidateGenerator.for_model(remembering(memory, fallback=None), model)
    assert again.get_candidates(fresh)[0].tolist() == [[44, 3, 8, 12]]


def test_the_loop_lets_go_of_a_generator_which_finishes_its_text(model, tmp_path, monkeypatch):
    """transformers closes no generator: what it wrote was never finished nor kept."""
    memory = OutputMemory(path=tmp_path / "log")
    assistant = remembering(memory, budget=8)

    def make(self, *args, **kwargs):
        return RetrievalCandidateGenerator.for_model(assistant, model, 37)

    monkeypatch.setattr(RetrievalLlama, "_get_candidate_generator", make)
    output = run(model, PROMPT, prompt_lookup_num_tokens=1)
    kept = OutputMemory(path=tmp_path / "log")
    assert len(kept) == 1
    # A session takes the prompt's last token for the first one generated.
    assert kept.token_count == 1 + output.shape[1] - PROMPT.shape[1]


def test_several_rows_are_refused():
    generator = RetrievalCandidateGenerator(oracle_assistant(PROMPT), Target(67))
    with pytest.raises(ValueError, match="one row"):
        generator.get_candidates(PROMPT.repeat(2, 1))


@pytest.mark.parametrize("placeholder", [-200, 2**31 + 5])
def test_placeholders_are_drafted_behind(placeholder):
    text = torch.tensor([[5, 9, placeholder, 7, 44, 5, 9, placeholder]])
    generator = RetrievalCandidateGenerator(remembering(budget=4), Target(67))
    candidates, _ = generator.get_candidates(text)
    assert torch.equal(candidates[:, :8], text)
    longer = torch.cat([text, torch.tensor([[7]])], dim=1)
    generator.update_candidate_strategy(longer, None, 1)
    candidates, _ = generator.get_candidates(longer)
    assert candidates[0, 9:11].tolist() == [44, 5]
