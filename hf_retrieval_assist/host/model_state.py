"""What of a model decides how its forwards compute, beside inputs: a key that is cheap to ask.

Hooks, adapters and settings come and go between calls. What was found out about a model's forwards
holds while its key is the same. Attributes that forwards themselves change, such as counters, are
found by :func:`restored` and left out of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..structures.lookups import Lookups, Snapshot
from ..structures.modules import held_by, modules_of
from ..structures.modules import own_attributes as attributes_but
from ..system import changes
from .callers_hooks import all_hooks, callers_global_hooks, is_callers, may_change
from .callers_hooks import told as told_of
from .hook_state import LIBRARIES
from .plain_step import why_exchanged
from .told import (
    NAMES_OF_ALL,
    PLAIN,
    Moving,
    Teller,
    Told,
    configurations_in,
    members_of,
    told,
    version_of,
)
from .transformers_private import Hook, hooks_of

# PyTorch's settings by which operators compute.
_SETTINGS = (
    *("is_inference_mode_enabled", "is_grad_enabled", "get_default_dtype"),
    *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
    *(f"backends.{name}" for name in ("fp32_precision", "cudnn.allow_tf32", "cudnn.deterministic")),
    *(f"backends.mkldnn.{name}" for name in ("enabled", "deterministic")),
    *(f"backends.cudnn.{name}.fp32_precision" for name in ("conv", "rnn")),
    *(f"backends.cuda.{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn")),
    *(
        f"backends.cuda.matmul.{name}"
        for name in (
            *("fp32_precision", "allow_tf32", "allow_fp16_accumulation"),
            *(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
        )
    ),
)


def model_settings(model: nn.Module, moving: Moving | None = None) -> Hashable:
    """What stands for its modules' forwards, their attributes and configurations but `moving` ones,
    the kinds of their weights, their hooks but those that only look, how attention is computed, and
    modes that change operators."""
    modules, teller = modules_of(model), Teller(moving)
    moved = moving.by_address if moving else {}
    attributes = teller.attributes(modules, moved, _is_weight, _shown)
    hooks = [*callers_global_hooks(), *hooks_of(*modules)]
    return (
        Told(teller, attributes),
        tuple([_told(hook) for hook in hooks if may_change(hook)]),
        autocast_dtypes(),
        torch.get_default_device(),
    )


def _is_weight(value: Any) -> bool:
    """Whether it is a tensor that forwards compute with, as parameters are, and no setting."""
    return issubclass(type(value), torch.Tensor) and not _is_number(value)


def _shown(module: nn.Module, tensor: torch.Tensor) -> Any:
    """What stands for a tensor that is no buffer: nothing for one to compute with; how often it was
    written to for what forwards leave on modules that no caller has written, as Qwen2-VL's keeps
    how far positions are ahead of the text; of others they themselves."""
    if _is_weight(tensor):
        return None
    librarys = type(module).__module__.partition(".")[0] in LIBRARIES
    return version_of(tensor) if librarys else tensor


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be a switch, a limit or a counter."""
    try:
        return tensor.numel() == 1 and not tensor.is_floating_point()
    except Exception:  # it does not know its size, as before its first forward
        return False


def _switches(own: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Buffers of that kind, as observers have."""
    return [(n, x) for n, x in own["_buffers"].items() if x is not None and _is_number(x)]


def autocast_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that operators compute in where autocast changes that."""
    enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))
    return tuple(map(torch.get_autocast_dtype, enabled))


def torch_setting(name: str) -> Any:
    """PyTorch's; some raise where others have set the same thing by another name."""
    try:
        found = attrgetter(name)(torch)
        return found() if callable(found) else found
    except (AttributeError, RuntimeError) as error:
        return type(error)


def torch_settings() -> tuple[Any, ...]:
    """What operators take from the running thread and the process."""
    return *map(torch_setting, _SETTINGS), autocast_dtypes()


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that not every module has."""
    return attributes_but(module, NAMES_OF_ALL)


def has_changing_hooks(model: nn.Module) -> bool:
    """Whether hooks may change what the model's forwards compute."""
    return any(map(may_change, all_hooks(model)))


def _told(hook: Hook) -> Hashable:
    """A hook's number; the caller's, and those that are registered anew for every call with what is
    bound to them, are told by what they call and keep."""
    bound = isinstance(hook.called, partial)
    return told_of(hook) if bound or is_callers(hook.called) else hook.number


class Attributes:
    """What is told of a model now, attribute by attribute; nothing is kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._told = {id(owner): (weakref.ref(owner), _each(owner)) for owner in _owners(model)}

    def changed(self, model: nn.Module, plain: bool = True) -> Iterator[tuple[Any, list[str]]]:
        """Modules and configurations with the names of attributes that are others by now.

        Args:
            plain: look at plain values, too.
        """
        for owner in _owners(model):
            known, before = self._told.get(id(owner), (None, {}))
            if known is not None and known() is owner:
                now = _each(owner, plain)
                names = before.keys() | now.keys() if plain else before.keys() & now.keys()
                if changed := [name for name in names if before.get(name) != now.get(name)]:
                    yield owner, changed


def _owners(model: nn.Module) -> list[Any]:
    """Modules and configurations."""
    modules = modules_of(model)
    return [*modules, *configurations_in(*(vars(module).get("config") for module in modules))]


def _each(owner: Any, plain: bool = True) -> dict[str, Told]:
    """What is told of each attribute; nested configurations are owners of their own."""
    own, items = vars(owner), [*vars(owner).items()]
    if isinstance(owner, nn.Module):
        items = [*own_attributes(owner).items(), *_switches(own)]
    return {
        name: told(value)
        for name, value in items
        if plain or type(value) not in PLAIN
        if not (_is_weight(value) or issubclass(type(value), PreTrainedConfig))
    }


@contextmanager
def restored(model: nn.Module, moving: Moving) -> Iterator[None]:
    """Scope of forwards that plain decoding would not run: which objects modules hold, directly and
    in containers, is put back, and the places of what they changed are added to `moving`.

    What is written into tensors is not: see :class:`~..verification.traces.Traces`.
    """
    before = Attributes(model)
    tables: list[Any] = []
    for module in modules_of(model):
        own = vars(module)
        tables += own, own["_buffers"], own["_parameters"], own["_modules"]
        tables += _containers([*own_attributes(module).values()])
    held = [(table, members_of(table) or []) for table in tables]
    try:
        yield
    finally:
        for owner, names in before.changed(model):
            moving.add(owner, names)
        for table, members in held:
            if not _are_same(members, members_of(table) or []):
                _restore(table, members)


def _containers(values: list[Any]) -> list[Any]:
    """Those that can be changed among values, and in one another."""
    found: dict[int, Any] = {}
    for value in values:  # which become more
        if id(value) not in found and (members := members_of(value)) is not None:
            found[id(value)] = value
            values += members
    return [x for x in found.values() if issubclass(type(x), (dict, list, set))]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _restore(table: Any, members: list[Any]) -> None:
    """Let a container hold what it has held."""
    if issubclass(type(table), list):
        list.__setitem__(table, slice(None), members)
    elif issubclass(type(table), set):
        set.clear(table)
        set.update(table, members)
    else:
        before = dict(zip(members[::2], members[1::2], strict=True))
        for name in [name for name in dict.keys(table) if name not in before]:
            dict.__delitem__(table, name)
        dict.update(table, before)


class ModelWatch:
    """Notices that a model is changed between one of its forwards and the next.

    What modules, their parameters, buffers, hooks and attributes are, what lists and dictionaries
    among these hold, the configuration, where tensors lie and writes that PyTorch counts, what the
    forward looks up, what operators take from PyTorch, and what the loop asks of the model.

    Args:
        model: to look at.
        lookups: of its forward.
    """

    def __init__(self, model: nn.Module, lookups: Lookups) -> None:
        self._model, self._lookups = model, lookups
        modules = modules_of(model)
        configs = [vars(config) for config in configurations_in(model.config)]
        tables, lists, tensors = held_by(modules)
        self._snapshot = Snapshot(modules, configs + tables, lists, tensors)
        self.look()

    def look(self) -> None:
        """Take the model as it is now for what the last forward has left."""
        self._snapshot.take()
        self._said, self._settings = changes.said(), torch_settings()

    @property
    def changed(self) -> bool:
        """Whether it is another one than when it was last looked at."""
        return (
            self._said != changes.said()
            or not self._snapshot.is_same()
            or self._settings != torch_settings()
            or self._lookups.changed() is not None
            or why_exchanged(self._model) is not None
        )
