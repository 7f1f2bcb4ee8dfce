"""Sessions of an EAGLE head: what they draft must depend on the text alone, not on how it came."""

import numpy as np
import pytest
import torch

from hf_retrieval_assist.draft_models.eagle import EagleDrafter
from hf_retrieval_assist.drafters.base import Feedback, FeedbackNeeds, Target
from tests.support.eagle_fixtures import tiny_target
from tests.support.feature_following import assert_same, features_of, seen
from tests.support.heads import eagle_head
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
    return features_of(target, head.config.boundaries, text)


def start(head, prompt, **sizes):
    drafter = EagleDrafter(head, **{"top_k": 4, "depth": 3, "total": 12, **sizes})
    return drafter.start(np.array(prompt, np.int32), Target(vocab_size=VOCAB))


def draft_at_once(head, text, features, **sizes):
    session = start(head, text[:-1], **sizes)
    session.commit(text[-1:], seen(features[: len(text) - 1]))
    return session.propose(100)


def test_needs_are_the_heads_boundaries(head):
    assert EagleDrafter(head).needs == FeedbackNeeds(hidden_layers=(2, 5, 7))


def test_nothing_is_drafted_without_features_of_the_newest_token(head, text, features):
    session = start(head, text[:5])
    assert len(session.propose(10)) == 0
    session.commit(text[5:6], None)
    assert len(session.propose(10)) == 0
    session.commit(text[6:8], seen(features[5:7]))
    assert len(session.propose(10)) == 10
    session.commit(text[8:9], Feedback(np.zeros(1, np.int32), np.zeros(1, np.int32)))
    assert len(session.propose(10)) == 0


def test_a_tail_of_the_prompt_is_enough(head, text, features):
    """Positions count from the first token of the text, also when its features are not known."""
    session, whole = start(head, text[:20]), start(head, text[14:20])
    session.commit(text[20:21], seen(features[14:20]))
    whole.commit(text[20:21], seen(features[14:20]))
    # RoPE is relative, so a text that begins with the tail drafts the same.
    assert_same(session.propose(11), whole.propose(11))


def test_tokens_that_ended_the_text_early_are_harmless(head, text, features):
    session = start(head, text[:20])
    session.commit(text[20:21], seen(features[:20]))
    session.commit(text[21:22], seen(features[20:24]))
    assert_same(session.propose(11), draft_at_once(head, text[:22], features))


def test_far_beyond_the_trained_positions(head):
    length = 3 * head.config.trained_positions
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
    session = start(head, prompt)
    session.commit([3], seen(torch.randn(length, head.config.feature_width, generator=generator)))
    tree = session.propose(11)
    assert tree.fault(1 << 30, 1 << 30) is None
    assert len(tree) == 11


def test_what_a_tree_may_contain(head, text, features):
    drafter = EagleDrafter(head)
    tree = draft_at_once(head, text, features)
    assert set(tree.token_ids.tolist()) <= set(DRAFT_IDS.tolist())
    assert tree.depths.max() <= 4
    priors = drafter.priors()
    assert tree.classes.min() >= 0
    assert tree.classes.max() < len(priors)
    # The class is read from the probability given the parent, so its prior is close to it.
    above = np.where(tree.parents < 0, 1, tree.probs[tree.parents])
    np.testing.assert_allclose(priors[tree.classes], tree.probs / above, atol=0.11)


def test_min_prob_leaves_unlikely_nodes_unexpanded(head, text, features):
    session = start(head, text[:-1], min_prob=0.2, total=200)
    session.commit(text[-1:], seen(features[: len(text) - 1]))
    tree = session.propose(199)
    parents = tree.parents[tree.parents >= 0]
    assert len(parents)
    assert (tree.probs[parents] > 0.2).all()
    assert len(tree) < len(draft_at_once(head, text, features)) + 60


@pytest.mark.parametrize("scale", [0, 1e6])
def test_equal_scores_keep_the_tree_closed(target, text, features, scale):
    """Of all tokens of a level, or of a child and its parent where probabilities round to 1."""
    head = eagle_head(target)
    head.lm_head.weight.mul_(scale)
    tree = draft_at_once(head, text, features, min_prob=0.0)
    assert tree.fault(1 << 30, 1 << 30) is None
    assert len(tree) == 11 if scale == 0 else tree.depths.max() == 4


def test_sessions_of_several_threads_share_a_head(head, text, features):
    expected = [draft_at_once(head, text[:n], features) for n in range(10, 40)]
    drafts = in_threads(lambda n: draft_at_once(head, text[:n], features), range(10, 40))
    for tree, other in zip(drafts, expected, strict=True):
        assert_same(tree, other)


@pytest.mark.parametrize(
    "sizes", [{"top_k": 0}, {"depth": -1}, {"total": 1}, {"min_prob": 1.0}, {"min_prob": -0.1}]
)
def test_sizes_out_of_range(head, sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))}: expected"):
        EagleDrafter(head, **sizes)


def test_features_of_another_width(head, text):
    session = start(head, text[:5])
    with pytest.raises(ValueError, match=r"feedback.hidden_states: expected \[accepted, 96\]"):
        session.commit(text[5:6], seen(torch.zeros(5, 32)))
