"""t(n) measured on purpose, by the engine's own loop.

A drafter proposes chains of random tokens of the sizes in question, and the cost model learns from
their verification exactly what it would learn in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .assistants import Assistant
from .decoding.loop import cost_key
from .drafters.base import Drafter, DraftSession, Feedback, Target
from .host.transformers_private import input_device
from .planning.cost_model import CostModel
from .planning.cost_store import CostModels
from .token_tree import TokenTree

_ROUNDS = 12


def measure_cost(
    model: Any,
    sizes: Sequence[int],
    costs: CostModels,
    batch_size: int = 1,
    cache_length: int = 1024,
    reroute: bool = True,
) -> CostModel:
    """Time forwards of the given numbers of tokens per row.

    Args:
        model: a transformers model that stops at no token of its own accord.
        sizes: tokens per row, each at least 1.
        costs: what learns from the timings.
        batch_size: rows.
        cache_length: tokens of each row in the cache at the end of the measurement.
        reroute: as of :class:`Assistant`.

    Returns:
        The cost model in `costs` that learnt from these forwards.
    """
    # Room below the last draft, so that none is cut for want of tokens to generate.
    new_tokens = _ROUNDS * len(sizes) + max(sizes)
    length = max(1, cache_length - new_tokens)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(_vocab_size(model), (batch_size, length), generator=random)
    prompt = prompt.to(input_device(model))
    # Memory is allocated and kernels are chosen in the first round; it teaches nothing.
    warm_up = Assistant([_RandomChains(sizes)], budget="paper", reroute=reroute)
    _generate(model, prompt, warm_up, len(sizes) + max(sizes))
    measured = Assistant([_RandomChains(sizes)], budget="paper", reroute=reroute, costs=costs)
    _generate(model, prompt, measured, new_tokens)
    return costs.get(cost_key(model, prompt, length + new_tokens))


def _generate(model: Any, prompt: torch.Tensor, assistant: Assistant, new_tokens: int) -> None:
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        custom_generate=assistant,
        max_new_tokens=new_tokens,
        do_sample=False,
    )


def _vocab_size(model: Any) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


class _RandomChains(Drafter):
    """Chains that make forwards of the given sizes in turn."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> _RandomChainSession:
        return _RandomChainSession(self.sizes, target.vocab_size)


class _RandomChainSession(DraftSession):
    def __init__(self, sizes: Sequence[int], vocab_size: int):
        self._sizes = cycle(sizes)
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def propose(self, budget: int) -> TokenTree:
        nodes = next(self._sizes) - 1
        token_ids = self._random.integers(self._vocab_size, size=nodes, dtype=np.int32)
        return TokenTree.chain(token_ids, np.full(nodes, 0.5, np.float32))

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        """What the model says does not matter."""
