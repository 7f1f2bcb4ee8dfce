"""Five recorded heads, two rounds each: hidden states, logits, caches and trees must agree."""

import numpy as np
import pytest
import torch

from hf_retrieval_assist import EagleHead
from hf_retrieval_assist.draft_models.eagle import EagleDrafter
from hf_retrieval_assist.drafters.base import Target
from tests.support.eagle_fixtures import CASES, Case, load_case
from tests.support.feature_following import seen


def load(case, folder, **overrides):
    return EagleHead.from_pretrained(case.save(folder), case.target(), **overrides)


def session_of(case, head):
    """A session that keeps all candidates, so that no node is left unexpanded."""
    top_k, depth = case.tree["top_k"], case.tree["depth"]
    candidates = top_k + depth * top_k**2
    drafter = EagleDrafter(head, top_k, depth, total=1 + candidates, min_prob=0.0)
    prompt = case.io["round0.input_ids"][0, :-1].numpy().astype(np.int32)
    return drafter.start(prompt, Target(vocab_size=128))


def check_rounds(case, head):
    """Drive a session through both recorded rounds, comparing every call of the head."""
    calls = []
    head.register_forward_hook(lambda module, args, output: calls.append((args, output)))
    session = session_of(case, head)
    committed = case.io["round0.input_ids"].shape[1] - 1
    for number in (0, 1):
        calls.clear()
        prefix = f"round{number}."
        tokens = case.io[prefix + "input_ids"][0, committed:].tolist()
        committed += len(tokens)
        session.commit(tokens, seen(case.io[prefix + "target_hidden"][0]))
        tree = session.propose(1000).prune(case.tree["draft_nodes"])
        check_calls(case, head, prefix, calls)
        check_tree(case, prefix, tree)


def check_calls(case, head, prefix, calls):
    assert len(calls) == 4, "one call for the text, three for the levels"
    for number, ((_, token_ids, _, positions, mask, _), output) in enumerate(calls):
        recorded = {
            name: case.io[f"{prefix}call{number}.{name}"]
            for name in ("token_ids", "position_ids", "attn_allowed", "hidden_out", "logits")
        }
        assert torch.equal(token_ids, recorded["token_ids"])
        assert torch.equal(positions - 1, recorded["position_ids"])
        shape = recorded["attn_allowed"].shape
        allowed = torch.ones(shape, dtype=torch.bool) if mask is None else mask[0, 0] == 0
        assert torch.equal(allowed, recorded["attn_allowed"])
        torch.testing.assert_close(output, recorded["hidden_out"], atol=3e-4, rtol=0)
        torch.testing.assert_close(head.logits(output), recorded["logits"], atol=1e-3, rtol=0)
    cache = calls[0][0][-1]
    keys = cache.layers[0].keys
    torch.testing.assert_close(keys, case.io[prefix + "call0.k_cache_after"], atol=3e-4, rtol=0)


def check_tree(case, prefix, tree):
    assert tree.fault(1 << 30, 1 << 30) is None
    assert tree.token_ids.tolist() == case.io[prefix + "tree.draft_tokens"][0, 1:].tolist()
    assert tree.depths.tolist() == case.io[prefix + "tree.position_ids"][1:].tolist()
    recorded_mask = case.io[prefix + "tree.mask"][0, 0, 1:, 1:].bool().numpy()
    assert (tree.ancestor_mask == recorded_mask).all()


@pytest.mark.parametrize("name", CASES)
def test_both_rounds_agree(name, tmp_path):
    case = load_case(name)
    check_rounds(case, load(case, tmp_path))


def test_a_wrong_config_is_put_right_by_the_override(tmp_path):
    case = load_case("eagle3_target_hidden48_theta5e5")
    lying = Case(case.name, {**case.config, "rope_theta": 1e4}, case.tree, case.weights, case.io)
    check_rounds(case, load(lying, tmp_path, rope_theta=5e5))


@pytest.mark.parametrize("name", ["eagle1_fcbias", "eagle3_d2t"])
def test_a_smaller_budget_gives_the_best_of_the_full_tree(name, tmp_path):
    case = load_case(name)
    session = session_of(case, load(case, tmp_path))
    session.commit(
        [int(case.io["round0.input_ids"][0, -1])], seen(case.io["round0.target_hidden"][0])
    )
    for budget in range(1, 12):
        full, small = session.propose(1000).prune(budget), session.propose(budget)
        assert small.token_ids.tolist() == full.token_ids.tolist()
        assert small.parents.tolist() == full.parents.tolist()
        np.testing.assert_allclose(small.probs, full.probs, rtol=1e-4)
