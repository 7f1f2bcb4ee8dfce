"""Caches that callers give, and how two of them are compared."""

import io

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache


def dynamic(config):
    return DynamicCache(config=config)


def static(config):
    return StaticCache(config=config, max_cache_len=128)


def of_both(config):
    return EncoderDecoderCache(dynamic(config), dynamic(config))


CACHES = {
    "dynamic": dynamic,
    "of unknown layers": lambda config: DynamicCache(),
    "static": static,
    "both": of_both,
}


def assert_alike(one, other, tolerance=1e-4, owned=True):
    """Two caches, layers or parts of them are of one class and hold the same.

    Args:
        owned: whether tensors of the second own all of their memory, as those that are saved must.
    """
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, atol=tolerance, rtol=tolerance)
        if owned:
            assert other.is_contiguous()
            assert other.untyped_storage().nbytes() == other.nbytes
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair, tolerance, owned)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        # Static windows count by an integer once they are full.
        for name in one.keys() - ({"cumulative_length"} if "cumulative_length_int" in one else ()):
            assert_alike(one[name], other[name], tolerance, owned)
    elif hasattr(one, "__dict__") and not isinstance(one, type):
        assert_alike(vars(one), vars(other), tolerance, owned)
    else:
        assert one == other


def saved(cache):
    """A cache that was saved and loaded, without a name of this package in the file."""
    file = io.BytesIO()
    torch.save(cache, file)
    assert b"hf_retrieval_assist" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)
