"""Drafters that follow the target's hidden states or run its first layers, and what holds of every
fallback."""

import functools
import itertools

import pytest
import torch

from hf_retrieval_assist import Assistant, EagleHead
from hf_retrieval_assist.draft_models import draft_model
from hf_retrieval_assist.extensions.heads import dflash, layers_follower
from hf_retrieval_assist.extensions.heads.eagle import EagleDrafter
from tests.support.drafted_texts import Texts
from tests.support.eagle_fixtures import load_case, outputs
from tests.support.feature_following import assert_same
from tests.support.heads import DRAFTERS, assisted
from tests.support.lossless import PROMPT, padded, run
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases, crossed
from tests.support.wrapped_models import WRAPS


@functools.cache
def texts_of(name):
    target, drafter = assisted(name)
    return Texts(drafter, target)


@pytest.mark.parametrize("name", ["DFlash", "EAGLE"])
def test_hidden_states_wait_in_bounded_numbers(name):
    """Who is never asked holds no more of a long text than its cache."""
    texts = texts_of(name)
    texts.start(1)
    texts.sessions[1].follower.chunk = 8
    for _ in range(21):
        texts.grow(1, 1)
        assert texts.sessions[1].waiting < 8
    assert_same(*texts.propose([1]), texts.fresh(1).propose(12))


@pytest.mark.parametrize("name", ["EAGLE", "MTP"])
def test_a_long_text_is_followed_in_parts(name):
    texts = texts_of(name)
    texts.start(5)
    texts.sessions[5].follower.chunk = 7
    assert_same(*texts.propose([5]), texts.fresh(5).propose(12))


OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}


@pytest.mark.filterwarnings("ignore:`is_gradient")
@pytest.mark.parametrize(("name", "wrap"), cases(crossed(["eagle1_fcbias", "eagle3_d2t"], WRAPS)))
def test_wrapped_targets(name, wrap, tmp_path):
    case = load_case(name)
    target = wrap(case.target())
    head = EagleHead.from_pretrained(case.save(tmp_path), target)
    exact = EagleHead.from_pretrained(tmp_path, case.target())
    torch.testing.assert_close(outputs(head), outputs(exact), atol=0.5, rtol=0.05)
    assistant = Assistant([EagleDrafter(head, total=16)], budget=12, trust_forward=True)
    agreeing(target, padded(1), make=lambda plain: assistant, **OPTIONS)
    assert assistant.stats.total.drafted > 0


LEVELS = layers_follower.LayerNodes, "_logits"
# What computes logits, but those of draft models.
LOGITS = {"DFlash": (dflash.BlockFollower, "_logits"), "EAGLE": LEVELS, "MTP": LEVELS}


SPOILT = crossed(DRAFTERS, [1, 2], [torch.nan, torch.inf], [1, 2])


@pytest.mark.parametrize(("name", "rows", "value", "every"), cases(SPOILT, 3))
def test_output_is_plain_where_logits_are_not_finite(llama, name, rows, value, every, monkeypatch):
    owner, method = LOGITS.get(name, (draft_model._Nodes, "_feed"))
    compute, calls = getattr(owner, method), itertools.count(1)

    def spoilt(*args, **kwargs):
        logits = compute(*args, **kwargs)
        if next(calls) % every == 0:
            logits[..., ::2] = value
        return logits

    monkeypatch.setattr(owner, method, spoilt)
    ids = PROMPT.repeat(rows, 1) + torch.arange(rows)[:, None]
    assistant = Assistant([DRAFTERS[name](llama)], budget=8, residual=name == "draws")
    assert torch.equal(run(llama, ids), run(llama, ids, assistant=assistant))
    assert next(calls) > 2
    assert assistant.stats.last.drafted or every == 1
    if name == "draws":
        sampled = run(llama, ids, assistant=assistant, do_sample=True)
        assert sampled.shape == (rows, PROMPT.shape[1] + 20)
