"""Every published format: its header loads, its drafts are those of its formulas, and what does not
fit is named."""

import re

import pytest
import torch

from hf_retrieval_assist import EagleHead, SamAssistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.extensions.heads.block_head import BlockHead
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter
from hf_retrieval_assist.extensions.heads.eagle import EagleDrafter
from hf_retrieval_assist.extensions.heads.fallbacks import FolderDrafter
from hf_retrieval_assist.extensions.heads.published import BLOCKS, read_published
from tests.support import drafted_texts
from tests.support.eagle_fixtures import tiny_target
from tests.support.feature_following import assert_same, features_of, seen
from tests.support.lossless import padded, run
from tests.support.one_text import OneText
from tests.support.oracle_drafter import agreeing
from tests.support.plain_heads import plain_head
from tests.support.published_heads import (
    FORMATS,
    OUTPUT,
    OWN,
    VOCAB,
    WIDTH,
    as_speculators,
    save,
    saved,
    tensors_of,
)
from tests.support.quick import cases, crossed

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


def drafted(folder, target, layers, top_k=VOCAB):
    """The hidden states before the last token of the text, and a draft behind it."""
    published = read_published(folder)
    if published.kind in BLOCKS:
        drafter = DFlashDrafter(BlockHead.of(published, target), top_k, total=40)
    else:
        drafter = EagleDrafter(EagleHead.of(published, target), depth=3, total=40, min_prob=0.0)
    assert drafter.needs.hidden_layers == layers
    session = OneText(drafter, TEXT[:-1], Target(VOCAB, model=target))
    features = features_of(target, layers, TEXT)[:-1]
    session.commit(TEXT[-1:], seen(features))
    return features, session.propose(100)


def assert_by_definition(head, features, tree):
    """Each node's probability behind its path is the formulas'."""
    assert tree.fault(1 << 30, 1 << 30) is None
    columns = {head.target_id(column): column for column in range(len(head.output))}
    for node in range(len(tree)):
        path = tree.token_ids[tree.path(node)].tolist()
        given = float(head.given(features, TEXT, path[:-1])[columns[path[-1]]])
        above = tree.probs[tree.parents[node]] if tree.parents[node] >= 0 else 1.0
        assert tree.probs[node] / above == pytest.approx(given, rel=5e-3)


DISTINCT = [
    "EAGLE-3 of SpecForge",
    "EAGLE-3.1, a norm for each layer's features",
    "speculators peagle",
    "speculators dflash, windows and a reduced vocabulary",
    "speculators dspark, rnn",
    "DFlash 2 of z-lab",
]


@pytest.mark.parametrize("name", cases(FORMATS, DISTINCT))
def test_drafts_are_those_of_the_formulas(name, target, tmp_path):
    folder, layers = saved(tmp_path, name), layers_of(name)
    asked = FolderDrafter(folder).needs.hidden_layers
    assert (asked(10) if callable(asked) else asked) == layers
    features, tree = drafted(folder, target, layers)
    assert len(tree) >= 20
    assert tree.depths.max() > 1
    head = plain_head(tensors_of(name), FORMATS[name][0], target)
    assert_by_definition(head, features, tree)
    if "dspark" in name.lower():  # a Markov head speaks of the likeliest ids alone
        head.top_k = 3
        features, tree = drafted(folder, target, layers, head.top_k)
        assert len(tree) > 3
        assert_by_definition(head, features, tree)


BLOCK_HEADS = [name for name in FORMATS if {"dflash", "dspark"} & {*name.lower().split()}]
BLOCK_HEADS += [name for name in FORMATS if "dflash2" in name or name == "speculators peagle"]


@pytest.mark.parametrize("name", cases(BLOCK_HEADS, ["speculators peagle", "DSpark of DeepSpec"]))
def test_all_levels_of_a_block_are_one_forward(name, target, tmp_path):
    """However many nodes are wanted; what is new in the text is read along, or before."""
    drafter = FolderDrafter(saved(tmp_path, name))
    session = OneText(drafter, TEXT[:-1], Target(VOCAB, model=target))
    session.commit(TEXT[-1:], seen(features_of(target, drafter.needs.hidden_layers, TEXT)[:-1]))
    (fitted,) = drafter._drafters.values()
    body = fitted.head if isinstance(fitted, EagleDrafter) else fitted._head.body
    forwards = []
    body.register_forward_hook(lambda module, given, output: forwards.append(1))
    first = session.propose(1)
    reading = name == "speculators peagle"
    assert (len(first), len(forwards)) == (1, 1 + reading)
    whole = session.propose(40)
    assert whole.depths.max() > 2
    assert len(forwards) == 2 + reading


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


MISFITS = {
    "missing": without,
    "misnamed": lambda tensors, name: without(tensors, name) | {f"other.{name}": tensors[name]},
    "misshapen": lambda tensors, name: tensors | {name: torch.stack([tensors[name]] * 2, dim=-1)},
    "too wide": lambda tensors, name: tensors | {name: torch.cat([tensors[name]] * 3, dim=-1)},
}


@pytest.mark.parametrize(("name", "misfit"), cases(crossed(FORMATS, MISFITS), 2))
def test_a_tensor_that_does_not_fit_is_named(name, misfit, target, tmp_path):
    config, tensors = FORMATS[name][0], tensors_of(name)
    optional = {*OWN} if "d2t" in tensors else {*OWN, *OUTPUT}
    for tensor in tensors:
        if tensor in optional or tensor.startswith("layers.1."):
            continue
        folder = save(tmp_path, config, MISFITS[misfit](tensors, tensor))
        with pytest.raises(ValueError, match=rf"\b{re.escape(as_speculators(tensor))}\b"):
            drafted(folder, target, layers_of(name))


CALLS = {
    "greedy": (1, {}),
    "batch": (3, {}),
    "sampled": (2, {"do_sample": True, "temperature": 0.8}),
}
PLAIN = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(("name", "call"), cases(crossed(FORMATS, CALLS)))
def test_a_folder_is_a_fallback_and_changes_nothing(name, call, target, tmp_path):
    rows, sampling = CALLS[call]
    folder = saved(tmp_path, name)
    fallback = str(folder) if rows == 1 else [folder, "logit_ngrams"]
    _, _, found = agreeing(
        *(target, padded(rows)),
        seed=1,
        make=lambda plain: SamAssistant(fallback=fallback, budget=8),
        **PLAIN | sampling,
    )
    assert found.stats.total.drafted > 0


@pytest.mark.parametrize("name", cases(FORMATS, DISTINCT[1:]))
def test_texts_of_a_batch_are_drafted_for_as_each_alone(name, target, tmp_path, monkeypatch):
    monkeypatch.setattr(drafted_texts, "VOCAB", VOCAB)
    batch, rows = drafted_texts.Texts(FolderDrafter(saved(tmp_path, name)), target), [0, 1, 3, 5]
    batch.start(*rows)
    for _ in range(3):
        for row, tree in zip(rows, batch.propose(rows), strict=True):
            assert len(tree) > 3
            assert_same(tree, batch.fresh(row).propose(12))
            batch.grow(row, 1 + row % 3)


def test_a_head_in_a_folder_is_fitted_to_each_target_once(target, tmp_path):
    """Two turns of two targets, of which the second has other default layers."""
    assistant = SamAssistant(fallback=saved(tmp_path, "EAGLE-3 of SafeAILab"), budget=6)
    (drafter,) = (one for one in assistant.drafters if isinstance(one, FolderDrafter))
    other = tiny_target(WIDTH, num_layers=8)
    for _ in range(2):
        for model in (target, other):
            ids, options = torch.tensor([TEXT]), {"max_new_tokens": 6}
            expected = run(model, ids, **options)
            assert torch.equal(run(model, ids, assistant=assistant, **options), expected)
            assert assistant.stats.last.drafted > 0
    found = {model: one.head.boundaries for model, one in drafter._drafters.items()}
    assert found == {target: (2, 5, 7), other: (2, 4, 5)}


REFUSED = {
    "got 'domino'": ("speculators dflash", {"projector_type": "domino"}),
    "conv_group_size: expected a divisor of 32": ("speculators dflash2", {"conv_group_size": 5}),
    "selector_top_k: expected a number": ("speculators dflash2", {"selector_top_k": None}),
    "got 'medusa'": ("speculators dflash", {"speculators_model_type": "medusa"}),
    "expected vanilla, gated or rnn, got 'tree'": (
        "DSpark of DeepSpec",
        {"markov_head_type": "tree"},
    ),
    "target_layer_ids: expected them": (
        "speculators dflash",
        {"aux_hidden_state_layer_ids": None},
    ),
    "block_size: expected a number": ("DSpark of DeepSpec", {"block_size": 10**9}),
    "mask_token_id below the target's 128": ("DSpark of DeepSpec", {"mask_token_id": 128}),
    '"layers.2.self_attn.q_proj.weight"': ("DSpark of DeepSpec", {"num_hidden_layers": 3}),
    "settings of DFlash layers": ("DSpark of DeepSpec", {"hidden_act": "none"}),
    "rope_type to be one of": ("DSpark of DeepSpec", {"rope_scaling": {"type": "dynamic"}}),
    "boundaries: expected -1 or 0 to 9": ("DSpark of DeepSpec", {"target_layer_ids": [1, 90]}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_head_for_the_target_is_refused(message, target, tmp_path):
    name, changes = REFUSED[message]
    folder = saved(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(target, torch.tensor([TEXT]), assistant=SamAssistant(fallback=folder))
    with pytest.raises(ValueError, match=r"give the folder itself|expected a head of"):
        EagleHead.from_pretrained(folder, target)


def test_a_folder_without_a_head_and_a_name_without_a_folder(target, tmp_path):
    for nowhere in ("nowhere", "x" * 9999, "\0"):
        with pytest.raises(ValueError, match=r"the folder of a head, a drafter.*, got '"):
            SamAssistant(fallback=nowhere)
    with pytest.raises(ValueError, match=r"config.json: expected a readable JSON file"):
        SamAssistant(fallback=tmp_path)
    target.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="whole model is given as the model, not as its folder"):
        run(target, torch.tensor([TEXT]), assistant=SamAssistant(fallback=tmp_path / "model"))


def test_frequencies_stay_as_they_are_in_half_precision(target, tmp_path):
    half = tiny_target(WIDTH).to(torch.bfloat16)
    head = EagleHead.from_pretrained(saved(tmp_path, "EAGLE-3 of SafeAILab"), half)
    block = BlockHead.of(read_published(saved(tmp_path, "DFlash of z-lab")), half)
    for rotary in (head.rotary_emb, block.body.rotary_emb):
        rates = 5e5 ** (-torch.arange(0, 8, 2) / 8)
        torch.testing.assert_close(rotary.inv_freq, rates, rtol=1e-6, atol=0)
