"""Models that draft: EAGLE heads, MTP layers, DFlash models, early exit, smaller models."""

from .eagle_format import HeadConfig, default_boundaries
from .eagle_head import EagleHead

__all__ = ["EagleHead", "HeadConfig", "default_boundaries"]
