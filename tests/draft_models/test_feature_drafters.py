"""What holds of every drafter that follows the target's hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.draft_models.dflash import DFlashDrafter
from tests.draft_models.test_dflash import block_drafter
from tests.support.feature_following import TEXT, features_of, seen, session_of
from tests.support.heads import head_drafter
from tests.support.lossless import build, run
from tests.support.tiny_models import VOCAB


def make(name: str) -> tuple[Any, Any]:
    """(target, drafter)."""
    kind = "Gemma3ForCausalLM" if name == "MTP of Gemma 3" else "LlamaForCausalLM"
    target = build(getattr(transformers, kind))
    if name == "DFlash model":
        return target, DFlashDrafter(block_drafter())
    return target, head_drafter(name, target)


NAMES = ["DFlash model", "EAGLE", "MTP", "MTP of Gemma 3"]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_do_not_depend_on_the_steps(name: str) -> None:
    target, drafter = make(name)
    features = features_of(target, drafter.needs.hidden_layers)
    whole = session_of(drafter, target, TEXT[:29])
    whole.commit(TEXT[29:30], seen(features[:29]))
    expected = whole.propose(12)
    for steps in ([1] * 20, [4, 1, 7, 8], [20]):
        session, known = session_of(drafter, target, TEXT[:9]), 9
        session.commit(TEXT[9:10], seen(features[:9]))
        for length in steps:
            if length % 2:
                session.propose(12)
            session.commit(TEXT[known + 1 : known + 1 + length], seen(features[known:][:length]))
            known += length
        for tree in (session.propose(12), session.propose(12)):
            assert tree.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(tree.probs, expected.probs, rtol=1e-3)


@pytest.mark.parametrize("name", ["EAGLE", "MTP"])
def test_a_long_text_is_followed_in_parts(name: str) -> None:
    target, drafter = make(name)
    features = features_of(target, drafter.needs.hidden_layers)
    trees = []
    for chunk in (512, 7):
        session = session_of(drafter, target, TEXT[:29])
        session.follower.chunk = chunk
        session.commit(TEXT[29:30], seen(features[:29]))
        trees.append(session.propose(12))
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
    np.testing.assert_allclose(trees[0].probs, trees[1].probs, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rows", "sampling"),
    [(1, {}), (3, {}), (1, {"do_sample": True})],
    ids=["greedy", "batch", "seeded"],
)
def test_output_is_plain(name: str, rows: int, sampling: dict[str, Any]) -> None:
    target, drafter = make(name)
    ids = torch.randint(1, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(2))
    expected = run(target, ids, **sampling)
    for assistant in (
        Assistant([drafter], budget=8),
        SamAssistant(expected.tolist(), fallback=[drafter, "token_recycling"], budget=16),
    ):
        assert run(target, ids, assistant=assistant, **sampling).tolist() == expected.tolist()
        assert assistant.stats.total.drafted > 0
