"""Drafters that follow the target's hidden states, fed by hand."""

import numpy as np
import torch

from hf_retrieval_assist.drafters.base import Feedback
from hf_retrieval_assist.extensions.heads.features import FeatureDrafter
from hf_retrieval_assist.host.feature_taps import FeatureTaps

from .tiny_models import VOCAB

# Well beyond the tiny models' windows.
TEXT = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def features_of(model, layers=(-1,), text=TEXT):
    """[text, widths of the layers], the model's hidden states."""
    with torch.no_grad(), FeatureTaps(model, [layers]) as taps:
        model(torch.tensor([list(text)]), logits_to_keep=1)
    return taps.features[layers][0]


def seen(features):
    """What a forward over accepted tokens tells."""
    rows = np.arange(len(features), dtype=np.int32)
    return Feedback(np.zeros(len(features), np.int32), rows, rows - 1, hidden_states=features)


def assert_same(tree, other):
    """Both drafts have the same nodes, and nearly the same probabilities."""
    assert tree.token_ids.tolist() == other.token_ids.tolist()
    assert tree.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(tree.probs, other.probs, rtol=2e-3, atol=0)


def chains_of(monkeypatch, generator, drafter=FeatureDrafter):
    """What one of transformers' candidate generators drafts behind each text, and what ours do."""
    theirs, ours = {}, {}
    get_candidates, propose = generator.get_candidates, drafter.propose

    def record_theirs(self, input_ids, *args, **kwargs):
        result = get_candidates(self, input_ids, *args, **kwargs)
        if new := result[0][0, input_ids.shape[1] :].tolist():
            theirs[tuple(input_ids[0].tolist())] = new
        return result

    def record_ours(self, sessions, budgets):
        trees = propose(self, sessions, budgets)
        for session, tree in zip(sessions, trees, strict=True):
            text = session.tokens if drafter is FeatureDrafter else session.text
            ours[tuple(text)] = tree.token_ids.tolist()
        return trees

    monkeypatch.setattr(generator, "get_candidates", record_theirs)
    monkeypatch.setattr(drafter, "propose", record_ours)
    return theirs, ours
