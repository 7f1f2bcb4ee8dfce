"""Layers of decoders written out from their tensors, without a cache."""

import torch


class PlainLayers:
    """Layers over n tokens in a row, at positions 0, 1, ...

    Attributes:
        tensors: by name.
        eps: of the norms, which multiply by `unit` plus their weight.
        theta: of the rotary embedding.
    """

    def __init__(self, tensors, eps, theta, unit=0):
        self.tensors, self.eps, self.theta, self.unit = tensors, eps, theta, unit

    def norm(self, x, name):
        scaled = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return scaled * (self.unit + self.tensors[f"{name}.weight"])

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T

    def rotate(self, x, share=1.0):
        """x: [n, heads, width]; rotary positions in the first share of each head."""
        width = int(x.shape[-1] * share)
        rates = self.theta ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(len(x))[:, None, None] * rates
        first, second = x[..., : width // 2], x[..., width // 2 : width]
        turned = [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ]
        return torch.cat([*turned, x[..., width:]], dim=-1)

    def attention(self, queries, keys, values, later=None):
        """[n, heads, width] each, of keys and values fewer heads; returns that of queries, which
        do not see the keys that `later` marks, bool [n, n]: as a rule those that come later."""
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[-1] ** 0.5
        if later is None:
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def swiglu(self, x, name):
        gated = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gated * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")
