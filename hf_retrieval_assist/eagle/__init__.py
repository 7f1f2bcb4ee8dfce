"""EAGLE draft heads: loading, running, and training them."""

from .cache import HeadCache
from .config import HeadConfig, default_boundaries
from .head import EagleHead

__all__ = ["EagleHead", "HeadCache", "HeadConfig", "default_boundaries"]
