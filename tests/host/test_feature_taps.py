"""Captured boundaries must be those transformers reports, however the model is wrapped."""

import pytest
import torch
from torch import nn

from hf_retrieval_assist.extensions.heads.published import default_boundaries
from hf_retrieval_assist.host.feature_taps import FeatureTaps, find_blocks
from tests.support.eagle_fixtures import tiny_target
from tests.support.lossless import build
from tests.support.rounding import OF_MODEL, within
from tests.support.threads import in_threads
from tests.support.wrapped_models import WRAPS

MODELS = ("Llama", "Gemma3", "Qwen3", "GPTNeoX", "OPT", "Mixtral", "Olmo3")


@pytest.fixture
def token_ids():
    return torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(1))


def reported(model, token_ids, boundaries):
    hidden = model(token_ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden[k] for k in boundaries], dim=-1)


def assert_captured(model, token_ids, boundaries, **options):
    """One forward shows a tap what the model reports."""
    with FeatureTaps(model, [boundaries]) as taps:
        model(token_ids, **options)
    expected = reported(model, token_ids, boundaries)
    torch.testing.assert_close(taps.features[boundaries], expected, **within(expected, OF_MODEL))


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", [*(f"{name}ForCausalLM" for name in MODELS), "GPT2LMHeadModel"])
@torch.no_grad()
def test_boundaries_are_those_of_output_hidden_states(name, token_ids):
    model = build(name)
    assert_captured(model, token_ids, (0, 1, 2, -1), logits_to_keep=1)


def test_the_papers_boundaries_also_of_small_targets():
    assert [default_boundaries(n) for n in (1, 3, 4, 10)] == [(0,), (0, 1, 2), (1, 2), (2, 5, 7)]


@torch.no_grad()
def test_layers_may_depend_on_the_number_of_blocks(token_ids):
    """The boundary behind the last block is the last hidden state, as transformers counts."""
    model = build("LlamaForCausalLM")
    blocks = model.config.num_hidden_layers
    with FeatureTaps(model, [default_boundaries, (blocks,)]) as taps:
        model(token_ids)
    for asked, boundaries in (default_boundaries, default_boundaries(blocks)), ((blocks,), (-1,)):
        expected = reported(model, token_ids, boundaries)
        torch.testing.assert_close(taps.features[asked], expected, **within(expected, OF_MODEL))


@torch.no_grad()
def test_the_last_forward_counts_and_nothing_stays(token_ids):
    model = tiny_target(num_layers=3)
    before = hooks_of(model)
    taps = FeatureTaps(model, [(1,)])
    for part in (token_ids, token_ids[:, :3]):
        with taps:
            model(token_ids)
            model(part)
        assert taps.features[1,].shape == (2, part.shape[1], 64)
        assert hooks_of(model) == before
    with pytest.raises(IndexError), taps:
        model(token_ids + 1000)
    assert hooks_of(model) == before
    with pytest.raises(RuntimeError, match="no hidden states at boundaries"):
        taps.features  # noqa: B018


def test_a_module_that_is_no_decoder():
    with pytest.raises(ValueError, match="boundaries: expected"):
        FeatureTaps(tiny_target(num_layers=3), [(-2,)])
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        FeatureTaps(nn.Linear(2, 2), [(0,)])
    model = tiny_target(num_layers=3)
    model.config.num_hidden_layers = 17
    with pytest.raises(ValueError, match=r"num_hidden_layers = 17 blocks in LlamaForCausalLM"):
        FeatureTaps(model, [(0,)])


def test_the_blocks_are_told_from_smaller_lists_of_the_same_length():
    model = tiny_target(num_layers=3)
    model.model.scales = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert find_blocks(model) == (model.model, model.model.layers)


@torch.no_grad()
def test_another_threads_forward_is_not_captured(token_ids):
    model = tiny_target(num_layers=3)
    expected = reported(model, token_ids, [1])
    with FeatureTaps(model, [(1,)]) as taps:
        model(token_ids)
        in_threads(model, [token_ids[:1]])
    torch.testing.assert_close(taps.features[1,], expected, **within(expected, OF_MODEL))


@pytest.mark.filterwarnings("ignore:`is_gradient")
@pytest.mark.parametrize("wrap", WRAPS)
@torch.no_grad()
def test_wrapped_models(wrap, token_ids):
    assert_captured(wrap(tiny_target(num_layers=4)), token_ids, (1, 2, -1))
