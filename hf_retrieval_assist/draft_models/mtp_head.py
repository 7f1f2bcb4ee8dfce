"""A multi-token-prediction layer trained for a model whose checkpoint has none."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..host.borrowed import TargetShape, float_weight
from ..host.ranks import require_whole
from ..host.transformers_private import compute_device
from ..system.checkpoints import (
    check_fit,
    local_folder,
    read_json,
    read_tensors,
    write_checkpoint,
)
from .mtp_layers import MtpLayers, fresh_mtp_layer

_ARCHITECTURE = "MtpHead"


class MtpHead(MtpLayers):
    """One layer of transformers' own class, which drafts a part of the target's vocabulary.

    Made by `train_head` or the command `train-head --kind mtp`, loaded by `from_pretrained`, and
    given to a preset as its fallback.

    Args:
        target: the transformers model that it drafts for, whose embeddings and output layer it
            shares.
        draft_ids: int64 [Vd], the ids that it may draft, ascending; None: all.

    Raises:
        ValueError: transformers cannot make an MTP layer of the target's decoder layer; its output
            matrix is quantised or spread over processes; ids are out of range.

    Attributes:
        boundaries: of the residual stream that it reads.
        vocab_size: of the target.
    """

    draft_ids: Tensor
    rows: Tensor
    boundaries = (-1,)

    def __init__(self, target: Any, draft_ids: Tensor | None = None) -> None:
        require_whole(target, "target")
        super().__init__(fresh_mtp_layer(target))
        output = target.get_output_embeddings()
        weight = float_weight(output, compute_device(output))
        self.vocab_size = len(weight)
        ids = torch.arange(self.vocab_size) if draft_ids is None else draft_ids.unique().cpu()
        if len(ids) == 0 or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ValueError(f"draft_ids: expected ids in [0, {self.vocab_size}), got {ids}")
        self.register_buffer("draft_ids", ids)
        # The target's, so not saved.
        rows = weight if draft_ids is None else weight[ids.to(weight.device)]
        self.register_buffer("rows", rows, persistent=False)
        self._name = target.config.name_or_path or None

    @classmethod
    def for_target(cls, target: Any, draft_ids: Tensor | None = None) -> MtpHead:
        """A fresh head in float32 on the target's device, ready to be trained.

        Its final norm starts as the target's own, which gives logits their scale; everything else
        as transformers initialises it.
        """
        head = cls(target, draft_ids)
        norm = head.layers[0].post_norm
        for child in target.get_decoder().children():
            if norm is not None and type(child) is type(norm):
                norm.load_state_dict(child.state_dict())
        return head.to(head.rows.device, torch.float32).requires_grad_(True)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        target: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> MtpHead:
        """Load a head that was trained for `target`.

        Args:
            path_or_hub_id: folder with `config.json` and `model.safetensors`, or a hub repository.
            target: the transformers model that it drafts for.
            dtype: of the head; the target's by default.
            device: of the head; where the target's logits are computed by default.

        Raises:
            ValueError: the files are damaged, or are no such head, or one for another target.
        """
        folder = local_folder(path_or_hub_id)
        config, vocab_size = read_json(folder / "config.json"), TargetShape.of(target).vocab_size
        expected = {"architectures": [_ARCHITECTURE], "vocab_size": vocab_size}
        for name, value in expected.items():
            if config.get(name) != value:
                raise ValueError(f"{name}: expected {value}, got {config.get(name)!r} in {folder}")
        tensors = read_tensors(folder)
        ids = tensors.get("draft_ids")
        if ids is not None and (
            ids.dtype != torch.int64 or ids.dim() != 1 or not ids.diff().gt(0).all()
        ):
            raise ValueError(f"draft_ids: expected ascending int64, found {ids}")
        head = cls(target, ids)
        check_fit(head.state_dict(), tensors)
        head.load_state_dict(tensors)
        return head.to(device or head.rows.device, dtype or target.dtype)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors`, each replaced in one step.

        The tensors are `draft_ids` and the layer's, under transformers' names in `MtpModel`; what
        is shared with the target is not written.
        """
        config = {
            "architectures": [_ARCHITECTURE],
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": len(self.draft_ids),
            "target": self._name,
        }
        write_checkpoint(folder, config, self.state_dict())

    def forward(
        self, hidden: Tensor, token_ids: Tensor, position_ids: Tensor, mask: Tensor, cache: Any
    ) -> Tensor:
        """One pass over n tokens, for training; as :meth:`EagleHead.forward`.

        Args:
            mask: bool [n, cached + n], True where a token may attend.
        """
        closed = torch.finfo(self.dtype).min
        additive = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, closed)
        return self.run(0, token_ids, hidden, position_ids + 1, additive[None, None], cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., Vd]: products with the target's output rows of the draft vocabulary."""
        return F.linear(hidden, self.rows)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.draft_ids[draft_ids.to(self.draft_ids.device)]
