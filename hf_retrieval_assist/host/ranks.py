"""Processes that compute one model together (tensor or pipeline parallelism), kept in lockstep.

Each holds a part of the weights, so all must feed the same tokens in every forward. How much to
verify is decided from timings, and drafted from memories, which differ between processes. So the
first rank drafts, and all verify what it planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..types.token_tree import Forest, TokenTree
from . import transformers_private

# What ranks say when they meet; the sum tells whether all said the same.
_GOES_ON, _ENDS, _FAILED = 1, 1 << 16, 1 << 32


class Ranks:
    """This process among those that compute a model together; a scope round a call.

    The ranks meet before the first forward, in every step and at the end of a call. So a rank that
    raises between two forwards ends the call on every rank, by an error and not by a wait. To meet
    is to sum two integers over all ranks; a plan that is not empty takes a second message.

    Args:
        group: process group of the ranks; None where this process computes the whole model.

    Attributes:
        several: whether the model is spread over several processes.
        leads: whether this process drafts: it is the first rank, or the only one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.several = group is not None
        self.leads = not self.several or torch.distributed.get_rank(group) == 0
        self._parted = False  # whether the others know that the call has failed

    @classmethod
    def of(cls, model: Any) -> Ranks:
        """Those that hold a model's parts."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        group = transformers_private.parts_group(model)
        if group is not None:
            return cls(group)
        from torch.distributed.tensor import DTensor

        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                if "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1:
                    return cls(mesh.get_group("tp"))
        return cls()

    def agree(self, trees: Forest, rows: int) -> Forest:
        """What the first rank verifies.

        Args:
            trees: its own, one per row; nobody looks at those of others.
            rows: how many there are.

        Raises:
            RuntimeError: another rank has failed, or has nothing left to do.
        """
        if self._group is None:
            return trees
        leads = self.leads
        nodes = self._meet(_GOES_ON, sum(map(len, trees)) if leads else 0)
        if not nodes:
            return Forest.empty(rows)
        packed = _pack(trees) if leads else np.empty(rows + 4 * nodes, np.int32)
        message = torch.from_numpy(packed).to(self._device)
        torch.distributed.broadcast(message, group=self._group, group_src=0)
        return trees if leads else _unpack(message.cpu().numpy(), rows)

    def lowest(self, value: int) -> int:
        """The lowest of the numbers that the ranks say; its own where there is one rank."""
        if self._group is None:
            return value
        message = torch.tensor(value, dtype=torch.int64, device=self._device)
        operation = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(message, operation, group=self._group)
        return int(message)

    def begin(self) -> None:
        """Wait until every rank is ready for the first forward.

        Raises:
            RuntimeError: another rank has failed.
        """
        if self._group is not None:
            self._meet(_GOES_ON)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Wait until every rank has come to the end of its call, or tell that this one fails.

        Raises:
            RuntimeError: another rank has failed, or goes on.
        """
        if self._group is None or self._parted:
            return
        if kind is None:
            self._meet(_ENDS)
        else:
            with suppress(RuntimeError):
                self._meet(_FAILED)

    @property
    def _device(self) -> torch.device:
        """Where the group's messages lie."""
        if "nccl" in torch.distributed.get_backend(self._group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _meet(self, state: int, nodes: int = 0) -> int:
        """Wait for the other ranks. Returns the sum of their `nodes`."""
        message = torch.tensor([state, nodes], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(message, group=self._group)
        states, nodes = message.tolist()
        if states != state * torch.distributed.get_world_size(self._group):
            self._parted = True
            what = "has failed" if states >= _FAILED else "has ended its text, or has not"
            raise RuntimeError(f"another process that computes this model {what}")
        return int(nodes)


def require_whole(model: Any, name: str) -> None:
    """ValueError unless this process holds a whole model, so that the first rank can run it alone.

    Args:
        model: that is run to draft.
        name: what to call it.
    """
    if Ranks.of(model).several:
        raise ValueError(f"{name}: expected a model that each process holds, got a part of one")


def _pack(trees: Sequence[TokenTree]) -> NDArray[np.int32]:
    """int32 [rows + 4 x nodes]: where trees end, then their arrays."""
    forest = Forest.of(trees)
    arrays = forest.token_ids, forest.parents, forest.probs.view(np.int32), forest.classes
    return np.concatenate([forest.offsets[1:].astype(np.int32), *arrays])


def _unpack(packed: NDArray[np.int32], rows: int) -> Forest:
    ids, parents, probs, classes = packed[rows:].reshape(4, -1)
    return Forest(ids, parents, probs.view(np.float32), classes, np.append(0, packed[:rows]))
