"""Checkpoints as they are published, damaged ones, and ones for another target."""

import json
import os
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from hf_retrieval_assist import EagleHead
from tests.support.eagle_fixtures import load_case, outputs, tiny_target, write_config


def save_bin(tensors, folder):
    torch.save(tensors, folder / "pytorch_model.bin")


def save_whole(tensors, folder):
    save_file(tensors, folder / "model.safetensors")


def save_safetensors_shards(tensors, folder):
    save_shards(tensors, folder, "model", "safetensors", save_file)


def save_bin_shards(tensors, folder):
    save_shards(tensors, folder, "pytorch_model", "bin", torch.save)


def save_shards(tensors, folder, stem, suffix, save):
    weight_map = {}
    for number, half in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        name = f"{stem}-{number}.{suffix}"
        save({key: tensors[key] for key in half}, folder / name)
        weight_map |= dict.fromkeys(half, name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_under_model_prefix(tensors, folder):
    save_bin({f"model.{name}": tensor for name, tensor in tensors.items()}, folder)


@pytest.mark.parametrize(
    "save", [save_bin, save_safetensors_shards, save_bin_shards, save_under_model_prefix]
)
@pytest.mark.parametrize("name", ["eagle1_fcbias", "eagle3_d2t"])
def test_files_of_every_kind(name, save, tmp_path):
    case, target = load_case(name), load_case(name).target()
    expected = outputs(EagleHead.from_pretrained(case.save(tmp_path), target))
    (tmp_path / "model.safetensors").unlink()
    save(case.published(), tmp_path)
    found = outputs(EagleHead.from_pretrained(tmp_path, target))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def refused(folder, message, changes, name="eagle3_d2t", save=None):
    """Loading a checkpoint that is changed like this fails, and the message says why.

    Args:
        changes: settings, and tensors, those that are None left out.
    """
    case = load_case(name)
    tensors = {k: v for k, v in changes.items() if v is None or isinstance(v, torch.Tensor)}
    write_config(folder, case.config | {k: v for k, v in changes.items() if k not in tensors})
    changed = {k: v for k, v in (case.published() | tensors).items() if v is not None}
    (save or save_whole)(changed, folder)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, message.split(" ... ")))):
        EagleHead.from_pretrained(folder, case.target())


MISFITS = [
    # Tensors of another kind.
    *(
        (f"norm.weight: expected finite values ... found {value:g} to", {"norm.weight": weight})
        for value in (torch.nan, torch.inf, -torch.inf, 7e4)
        for weight in [torch.full((64,), value)]
    ),
    (
        "d2t: expected offsets to ids in [0, 128), found the id 130",
        {"d2t": torch.cat([torch.zeros(95, dtype=torch.long), torch.tensor([35])])},
    ),
    (
        "d2t: expected offsets to the ids that t2d marks",
        {"d2t": torch.zeros(96, dtype=torch.long), "t2d": torch.arange(128) >= 32},
    ),
    ("d2t: expected integers", {"d2t": torch.zeros(96)}),
    *(
        (f"fc.weight: expected float ... found {dtype}", {"fc.weight": weight}, "eagle3_d2t", save)
        for dtype in (torch.float8_e4m3fn, torch.int8, torch.complex64, torch.int64)
        for weight in [torch.ones(64, 192).to(dtype)]
        for save in (save_bin, save_safetensors_shards)
    ),
    (
        "layers: expected them numbered from 0 on",
        {"layers.1000000000.mlp.up_proj.weight": torch.ones(1, 1)},
    ),
    ("embed_tokens.weight", {"embed_tokens.weight": None}, "eagle3_target_hidden48_theta5e5"),
    # Settings.
    ("rope_theta: expected a number from", {"rope_theta": 0.5}),
    ("expected settings of EAGLE layers ... factor", {"rope_scaling": {"type": "linear"}}),
    ("rope_parameters: expected one set", {"rope_parameters": "default"}),
    ("rope_type to be one of", {"rope_scaling": {"type": ["linear"]}}),
    ("expected settings of EAGLE layers ... hidden_act", {"hidden_act": {"silu": 1}}),
    ("num_attention_heads: expected a multiple of", {"num_attention_heads": 7}),
    ("num_attention_heads: expected a whole number", {"num_attention_heads": 2.0}),
    ("head_dim: expected an even number", {"head_dim": 3}),
    ("head_dim: expected an even number", {"head_dim": 10**10}),
    ("layer_ids: expected a list", {"eagle_aux_hidden_state_layer_ids": "all"}),
    ("eagle_config: expected an object, got [1]", {"eagle_config": [1]}),
    ("fc_norm.1.weight", {"fc_norm": True, "fc_norm.0.weight": torch.ones(64)}),
    ("mask_token_id: expected a number", {"mask_hidden": torch.zeros(1, 1, 192)}),
    ("mask_hidden", {"eagle_config": {"parallel_drafting": True, "mask_token_id": 5}}),
]


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit[0])
def test_what_does_not_fit_is_named(misfit, tmp_path):
    refused(tmp_path, *misfit)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil-was-run",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, load_case("eagle3_d2t").config)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(ValueError, match=r"pytorch_model.bin: expected a file of tensors"):
        EagleHead.from_pretrained(tmp_path, tiny_target())
    assert not (tmp_path / "evil-was-run").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config", "", "expected a readable JSON file"),
        ("config", "[1]", "expected a JSON object, found list"),
        ("config", "{}", "hidden_size: expected a number"),
        ("config", "[" * 100_000, "expected a readable JSON file"),
        ("config", '{"transformer_layer_config": 3}', "config: expected an object, got 3"),
        (
            "model.safetensors.index",
            '{"weight_map": {"fc.weight": "../elsewhere.safetensors"}}',
            "to name files of the same folder",
        ),
        ("none", "{}", "expected model.safetensors or pytorch_model.bin"),
    ],
)
def test_damaged_files_of_settings(file, content, message, tmp_path):
    """And a folder without weights."""
    case = load_case("eagle3_d2t")
    case.save(tmp_path)
    if file != "config":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / f"{file}.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        EagleHead.from_pretrained(tmp_path, case.target())


def test_dtype_follows_the_target_and_may_be_given(tmp_path):
    case = load_case("eagle1_fcbias")
    folder = case.save(tmp_path)
    head = EagleHead.from_pretrained(folder, case.target())
    half = EagleHead.from_pretrained(folder, case.target().to(torch.bfloat16))
    double = EagleHead.from_pretrained(folder, case.target(), dtype=torch.float64)
    assert (head.dtype, half.dtype, double.dtype) == (torch.float32, torch.bfloat16, torch.float64)
    torch.testing.assert_close(outputs(half), outputs(head), atol=1.0, rtol=0.1)
    with pytest.raises(ValueError, match=r"fc.weight"):
        EagleHead.from_pretrained(folder, tiny_target(32))
    with pytest.raises(ValueError, match=r"embed_tokens.weight"):
        EagleHead.from_pretrained(folder, tiny_target(64, vocab_size=99))


def test_moving_a_head_leaves_the_target_alone(tmp_path):
    case = load_case("eagle3_d2t")
    target = case.target()
    head = EagleHead.from_pretrained(case.save(tmp_path), target)
    weight = target.model.embed_tokens.weight
    assert head.borrowed.embedding_weight.data_ptr() == weight.data_ptr()
    assert not any("embed" in name for name in head.state_dict())
    head.to(torch.float64)
    assert target.model.embed_tokens.weight.dtype == torch.float32
