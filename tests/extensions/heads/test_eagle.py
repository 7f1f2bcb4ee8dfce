"""Drafts of EAGLE heads: of the text alone, as recorded ones did and as one written out does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_retrieval_assist import EagleHead
from hf_retrieval_assist.drafters.base import Feedback, Target
from hf_retrieval_assist.extensions.heads.eagle import EagleDrafter
from tests.support.eagle_fixtures import CASES, load_case, tiny_target
from tests.support.feature_following import assert_same, features_of, seen
from tests.support.heads import eagle_head
from tests.support.one_text import OneText
from tests.support.threads import in_threads

VOCAB = 128
DRAFT_IDS = torch.arange(1, VOCAB, 2)


@pytest.fixture(scope="module")
def target():
    return tiny_target(32)


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(2)
    fresh = eagle_head(target, draft_ids=DRAFT_IDS)
    # A peaked output, so that the probabilities of candidates differ.
    fresh.lm_head.weight.mul_(60)
    return fresh


@pytest.fixture(scope="module")
def text():
    return torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def features(target, head, text):
    """[40, width], the target's features of the text."""
    return features_of(target, head.boundaries, text)


def start(head, prompt, **sizes):
    drafter = EagleDrafter(head, **{"top_k": 4, "depth": 3, "total": 12, **sizes})
    return OneText(drafter, prompt, Target(vocab_size=VOCAB))


def draft_at_once(head, text, features, **sizes):
    session = start(head, text[:-1], **sizes)
    session.commit(text[-1:], seen(features[: len(text) - 1]))
    return session.propose(100)


def test_nothing_is_drafted_without_features_of_the_newest_token(head, text, features):
    session = start(head, text[:5])
    assert len(session.propose(10)) == 0
    session.commit(text[5:6], None)
    assert len(session.propose(10)) == 0
    session.commit(text[6:8], seen(features[5:7]))
    assert len(session.propose(10)) == 10
    session.commit(text[8:9], Feedback(*np.zeros((2, 1), np.int32), np.full(1, -1, np.int32)))
    assert len(session.propose(10)) == 0


def test_a_tail_of_the_prompt_is_enough(head, text, features):
    """Positions count from the first token of the text, also when its features are not known."""
    session, whole = start(head, text[:20]), start(head, text[14:20])
    session.commit(text[20:21], seen(features[14:20]))
    whole.commit(text[20:21], seen(features[14:20]))
    # RoPE is relative, so a text that begins with the tail drafts the same.
    assert_same(session.propose(11), whole.propose(11))


def test_what_a_tree_may_contain(head, text, features):
    priors, tree = EagleDrafter(head).evidence.priors, draft_at_once(head, text, features)
    assert set(tree.token_ids.tolist()) <= set(DRAFT_IDS.tolist())
    assert tree.depths.max() <= 4
    assert 0 <= tree.classes.min() <= tree.classes.max() < len(priors)
    # The class is read from the probability given the parent, so its prior is close to it.
    above = np.where(tree.parents < 0, 1, tree.probs[tree.parents])
    np.testing.assert_allclose(priors[tree.classes], tree.probs / above, rtol=0, atol=0.11)


def test_min_prob_leaves_unlikely_nodes_unexpanded(head, text, features):
    session = start(head, text[:-1], min_prob=0.2, total=200)
    session.commit(text[-1:], seen(features[: len(text) - 1]))
    tree = session.propose(199)
    parents = tree.parents[tree.parents >= 0]
    assert len(parents)
    assert (tree.probs[parents] > 0.2).all()
    assert len(tree) < len(draft_at_once(head, text, features)) + 60


def test_sessions_of_several_threads_share_a_head(head, text, features):
    expected = [draft_at_once(head, text[:n], features) for n in range(10, 40)]
    drafts = in_threads(lambda n: draft_at_once(head, text[:n], features), range(10, 40))
    for tree, other in zip(drafts, expected, strict=True):
        assert_same(tree, other)


def test_sizes_out_of_range(head):
    for name, size in (("top_k", 0), ("depth", -1), ("total", 1), ("min_prob", 1.0)):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            EagleDrafter(head, **{name: size})


def load(case, folder, **overrides):
    return EagleHead.from_pretrained(case.save(folder), case.target(), **overrides)


def check_rounds(case, head):
    """Drive a session through both recorded rounds, comparing their trees.

    It keeps all candidates, so that no node is left unexpanded.
    """
    top_k, depth = case.tree["top_k"], case.tree["depth"]
    candidates = top_k + depth * top_k**2
    drafter = EagleDrafter(head, top_k, depth, total=1 + candidates, min_prob=0.0)
    prompt = case.io["round0.input_ids"][0, :-1].numpy()
    session, committed = OneText(drafter, prompt, Target(vocab_size=128)), len(prompt)
    for number in (0, 1):
        prefix = f"round{number}."
        tokens = case.io[prefix + "input_ids"][0, committed:].tolist()
        committed += len(tokens)
        session.commit(tokens, seen(case.io[prefix + "target_hidden"][0]))
        tree = session.propose(1000).prune(case.tree["draft_nodes"])
        assert tree.fault(1 << 30, 1 << 30) is None
        assert tree.token_ids.tolist() == case.io[prefix + "tree.draft_tokens"][0, 1:].tolist()
        assert tree.depths.tolist() == case.io[prefix + "tree.position_ids"][1:].tolist()
        recorded_mask = case.io[prefix + "tree.mask"][0, 0, 1:, 1:].bool().numpy()
        assert (tree.ancestor_mask == recorded_mask).all()


@pytest.mark.parametrize("name", [*CASES, "eagle3_target_hidden48_theta5e5, put right"])
def test_both_rounds_agree(name, tmp_path):
    """Also where a wrong config is put right by an override."""
    case = load_case(name.partition(",")[0])
    if name in CASES:
        check_rounds(case, load(case, tmp_path))
    else:
        lying = replace(case, config={**case.config, "rope_theta": 1e4})
        check_rounds(case, load(lying, tmp_path, rope_theta=5e5))
