"""Drafts of block drafters: transformers' candidates, and trees of the likeliest paths."""

import itertools

import numpy as np
import pytest
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter, product_tree
from tests.support.feature_following import chains_of
from tests.support.heads import BLOCK, block_drafter
from tests.support.lossless import run
from tests.support.trees import paths

NEW = 16


@pytest.mark.parametrize("window", [64, 6])
def test_the_chain_is_transformers_own(llama, window, monkeypatch):
    drafting = block_drafter(window)
    candidates, drafts = chains_of(monkeypatch, DFlashTokenCandidateGenerator)
    options = {"max_new_tokens": NEW}
    expected = run(llama, assistant_model=drafting, speculation_type="dflash", **options)
    assistant = Assistant([DFlashDrafter(drafting, top_k=1)], budget=BLOCK - 1)
    assert run(llama, assistant=assistant, **options).tolist() == expected.tolist()
    compared = 0
    for text, chain in candidates.items():
        if text in drafts:
            assert drafts[text] == chain
            compared += 1
    assert compared >= NEW // 2
    with pytest.raises(ValueError, match="expected a DFlash model"):
        DFlashDrafter(llama)


def test_product_trees_hold_the_likeliest_paths():
    """All paths are enumerated for it."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        probs = np.sort(generator.dirichlet(np.ones(4), 3).astype(np.float32))[:, ::-1][:, :3]
        ids = np.stack([generator.permutation(20)[:3] for _ in range(3)]).astype(np.int32)
        tree = product_tree(ids, np.log(probs), 10)
        assert tree.fault(1 << 30, 1 << 30) is None
        everything = {
            tuple(int(ids[d, r]) for d, r in enumerate(ranks)): float(
                np.prod([probs[d, r] for d, r in enumerate(ranks)])
            )
            for length in (1, 2, 3)
            for ranks in itertools.product(range(3), repeat=length)
        }
        best = sorted(everything, key=everything.__getitem__, reverse=True)[:10]
        assert set(paths(tree)) == set(best)
        for path, prob in zip(paths(tree), tree.probs, strict=True):
            assert prob == pytest.approx(everything[path], rel=1e-4)
