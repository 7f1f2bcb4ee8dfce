"""Models that draft: EAGLE heads, MTP layers, DFlash models, early exit, smaller models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .eagle_format import HeadConfig, default_boundaries
    from .eagle_head import EagleHead

__all__ = ["EagleHead", "HeadConfig", "default_boundaries"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = ".eagle_head" if name == "EagleHead" else ".eagle_format"
    return getattr(import_module(module, __name__), name)
