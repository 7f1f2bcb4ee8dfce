"""Lossless retrieval-based speculative decoding inside Hugging Face `generate`."""

__version__ = "0.1.0"
