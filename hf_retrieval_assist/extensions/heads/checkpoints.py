"""Folders of a config.json and tensors, which are untrusted input.

Nothing is unpickled beyond tensors.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.bool),
)
_LARGEST = torch.finfo(torch.float16).max
_DOWNLOADED = ["config.json", "*.safetensors", "*.bin", "*.index.json"]


def local_folder(path_or_hub_id: str | PathLike[str]) -> Path:
    """The folder itself, or a copy of the hub repository."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    return Path(snapshot_download(str(path_or_hub_id), allow_patterns=_DOWNLOADED))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError if the file holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_tensors(folder: Path) -> Tensors:
    """All weights; safetensors are preferred, and an index before a single file.

    Raises:
        ValueError: there are none, or a file is damaged.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            return _read_shards(index)
        if (folder / f"{stem}.{suffix}").is_file():
            return _read_file(folder / f"{stem}.{suffix}")
    raise ValueError(
        f"{folder}: expected model.safetensors or pytorch_model.bin, or their index, found neither"
    )


def _read_shards(index: Path) -> Tensors:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise ValueError(f"{index}: expected weight_map to name files of the same folder")
    tensors: Tensors = {}
    for name in sorted(set(weight_map.values())):
        tensors |= _read_file(index.parent / name)
    return tensors


def _read_file(path: Path) -> Tensors:
    tensors: Any
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged pickle ends the unpickler's machine wherever it happens to be.
    except Exception as error:
        raise ValueError(f"{path}: expected a file of tensors ({error})") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{path}: expected a dictionary of tensors")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or not tensor.dim():
            found = f"{tensor.dtype} of {tensor.dim()} dimensions"
            raise ValueError(
                f"{path}: {name}: expected float64, float32, float16, bfloat16, int64, int32 or "
                f"bool of at least 1 dimension, found {found}"
            )
    return tensors


def load_weights(head: nn.Module, tensors: Tensors) -> None:
    """Give a head, which may be on the meta device, the tensors of its checkpoint.

    Raises:
        ValueError: a tensor is missing, misshapen, unknown or no weights (`check_numbers`); or the
            ids that it drafts are not the target's.
    """
    expected = head.state_dict()
    if "d2t" not in expected:
        tensors = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    for name, tensor in tensors.items():
        floating = expected.get(name, tensor).is_floating_point()
        if tensor.is_floating_point() != floating:
            wanted = "floating point" if floating else "integers"
            raise ValueError(f"{name}: expected {wanted}, found {tensor.dtype}")
        check_numbers(name, tensor)
    try:
        head.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"expected the tensors that the settings ask for ({error})") from error
    if "d2t" in tensors:
        _check_draft_vocabulary(tensors["d2t"], tensors["t2d"])


def _check_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """d2t holds offsets: draft id i stands for the target id i + d2t[i], a member of t2d."""
    ids = torch.arange(len(d2t)) + d2t
    inside = (ids >= 0) & (ids < len(t2d))
    if not inside.all():
        raise ValueError(
            f"d2t: expected offsets to ids in [0, {len(t2d)}), found the id {int(ids[~inside][0])}"
        )
    if not torch.equal(ids, t2d.nonzero().flatten()):
        raise ValueError("d2t: expected offsets to the ids that t2d marks, found others")


def check_numbers(name: str, tensor: Tensor) -> None:
    """ValueError for values that are not finite, and for those that half precision cannot hold:
    heads are trained and run in it, and products of larger ones are not finite either."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # NaN is both, and equal to nothing.
    values = tensor if tensor.itemsize > 1 else tensor.float()
    least, most = (float(end) for end in values.aminmax())
    if not -_LARGEST <= least <= most <= _LARGEST:
        raise ValueError(
            f"{name}: expected finite values of at most {_LARGEST:g}, found {least:g} to {most:g}"
        )
