"""Every published format: its header loads, its drafts are those of its formulas, and what does not
fit is named."""

import re

import pytest
import torch

from hf_retrieval_assist import EagleHead
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.extensions.heads.block_head import BlockHead
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter
from hf_retrieval_assist.extensions.heads.eagle import EagleDrafter
from hf_retrieval_assist.extensions.heads.published import BLOCKS, read_published
from tests.support.eagle_fixtures import tiny_target
from tests.support.feature_following import features_of, seen
from tests.support.one_text import OneText
from tests.support.plain_heads import plain_head
from tests.support.published_heads import (
    FORMATS,
    OUTPUT,
    OWN,
    VOCAB,
    WIDTH,
    save,
    saved,
    tensors_of,
)

TEXT = torch.randint(4, VOCAB, (14,), generator=torch.Generator().manual_seed(1)).tolist()
# By definition: indices of `hidden_states`, of a target of 10 layers.
LAYERS = {
    "EAGLE-1 of SafeAILab": (-1,),
    "EAGLE-3 of SafeAILab": (2, 5, 7),
    "EAGLE-3 of AngelSlim": (2, 5, 7),
    "DSpark of DeepSpec": (0, 5),
}


@pytest.fixture(scope="module")
def target():
    model = tiny_target(WIDTH)
    # Peaked, so that likely paths are deep.
    model.lm_head.weight.mul_(20)
    model.model.embed_tokens.weight.mul_(20)
    return model


def layers_of(name):
    eagle = "eagle" in name.lower()
    return LAYERS.get(name, (1, 4, 6) if eagle else (2, 5))


def drafted(folder, target, layers):
    """The hidden states before the last token of the text, and a draft behind it."""
    published = read_published(folder)
    if published.kind in BLOCKS:
        drafter = DFlashDrafter(BlockHead.of(published, target), top_k=VOCAB, total=40)
    else:
        drafter = EagleDrafter(EagleHead.of(published, target), depth=3, total=40, min_prob=0.0)
    session = OneText(drafter, TEXT[:-1], Target(VOCAB, model=target))
    features = features_of(target, layers, TEXT)[:-1]
    session.commit(TEXT[-1:], seen(features))
    return features, session.propose(100)


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_are_those_of_the_formulas(name, target, tmp_path):
    """Each node's probability behind its path, of all ids of a slot."""
    config, tensors = FORMATS[name][0], tensors_of(name)
    features, tree = drafted(saved(tmp_path, name), target, layers_of(name))
    head = plain_head(tensors, config, target)
    assert len(tree) >= 20
    assert tree.fault(1 << 30, 1 << 30) is None
    columns = {head.target_id(column): column for column in range(len(head.output))}
    assert tree.depths.max() > 1
    for node in range(len(tree)):
        path = tree.token_ids[tree.path(node)].tolist()
        given = float(head.given(features, TEXT, path[:-1])[columns[path[-1]]])
        above = tree.probs[tree.parents[node]] if tree.parents[node] >= 0 else 1.0
        assert tree.probs[node] / above == pytest.approx(given, rel=5e-3)


REQUIRED = {
    name: sorted(shapes.keys() - OWN.keys() - (set() if "d2t" in shapes else OUTPUT.keys()))
    for name, (_, shapes) in FORMATS.items()
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_tensor_missing_misnamed_or_misshapen_is_named(name, target, tmp_path):
    config, tensors = FORMATS[name][0], tensors_of(name)
    for tensor in REQUIRED[name]:
        shape = (*tensors[tensor].shape[:-1], tensors[tensor].shape[-1] + 1)
        others = {key: value for key, value in tensors.items() if key != tensor}
        ours = tensor.replace("midlayer.", "layers.0.")
        for changed in (
            others,
            others | {f"other.{tensor}": tensors[tensor]},
            others | {tensor: torch.zeros(shape, dtype=tensors[tensor].dtype)},
        ):
            folder = save(tmp_path, config, changed)
            with pytest.raises(ValueError, match=rf"\b{re.escape(ours)}\b"):
                drafted(folder, target, layers_of(name))
