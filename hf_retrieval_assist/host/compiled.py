"""Models of which a caller has compiled something, in place or beside."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..structures.modules import modules_of

# Compiled functions of these are the libraries' own, as flex attention is.
_LIBRARIES = ("torch.", "transformers.integrations.")


class CompiledCallError(RuntimeError):
    """A forward was about to call a function that a caller has compiled."""

    def __init__(self) -> None:
        super().__init__(
            "its caller has compiled a function of its forward; leave that to `generate` "
            "(compile_config)"
        )


def is_scripted(model: nn.Module) -> bool:
    """Whether a part of a model is TorchScript."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(model))


class RefuseCompiledCalls:
    """Scope of a thread's forwards, out of which a call of a function that a caller has compiled
    raises :class:`CompiledCallError`, before anything is compiled.

    Such functions may refuse lengths that they have not met, and are lost for their caller when
    they are called under a mode. Where the thread is profiled already, nothing is refused.
    """

    def __enter__(self) -> None:
        if sys.getprofile() is None:
            sys.setprofile(_refuse)

    def __exit__(self, *error: Any) -> None:
        if sys.getprofile() is _refuse:
            sys.setprofile(None)


def _refuse(frame: FrameType, event: str, _: Any) -> None:
    if (
        event == "call"
        and frame.f_code.co_qualname.startswith("_TorchDynamoContext.__call__.")
        and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
    ):
        function = frame.f_locals.get("fn")
        written_in = str(getattr(function, "__globals__", {}).get("__name__"))
        if not written_in.startswith(_LIBRARIES):
            raise CompiledCallError
