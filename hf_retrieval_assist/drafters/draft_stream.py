"""A draft model over one text: its cache follows the text, and trees are fed to it by levels."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..target.kv_cache import SlotCache
from ..target.service import choose_service
from ..target.tiers import Tier
from ..target.tree_attention import FedTrees, LayerMask, TreeAttention
from ..token_tree import Int32Array

_SPARE = 256  # slots reserved behind the prompt


class DraftStream:
    """The draft model's cache over one text, and the nodes of a tree fed behind it.

    What the text has grown by waits until a draft is wanted, so that a model which is only asked
    now and then catches up in one forward.

    Args:
        model: a transformers model that the tree tier can serve.
        prompt_ids: the text so far.

    Attributes:
        text: ids of the whole text.
    """

    def __init__(self, model: Any, prompt_ids: Sequence[int]):
        self.model = model
        self.text = [int(token) for token in prompt_ids]
        config = model.config.get_text_config(decoder=True)
        self._cache = SlotCache(config, capacity=len(self.text) + _SPARE)
        self._cache.begin(1)
        self._attention = TreeAttention(mask_rules(model), None, model.dtype)
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def cached(self) -> int:
        """Tokens of the text that the cache holds."""
        return self._cache.slots.longest

    def catch_up(self) -> torch.Tensor:
        """Feed what is new in the text. Returns the logits [1, vocab_size] after its last token."""
        self.keep([])
        # When all is cached, the last token is fed again for its logits.
        self._cache.slots.set_lengths([min(self.cached, len(self.text) - 1)])
        self.keep([])
        new = torch.tensor(self.text[self.cached :], device=self.model.device)
        depths = np.arange(len(new))
        chain = depths[:, None] >= depths
        logits = self._forward(new, depths, depths, chain, self._last_only)
        self.keep(range(len(new)))
        return logits[-1:]

    def feed(
        self,
        token_ids: torch.Tensor,
        depths: NDArray[np.int64],
        column_depths: NDArray[np.int64],
        attends: NDArray[np.bool_],
    ) -> torch.Tensor:
        """Feed nodes of a tree behind those fed already.

        Args:
            token_ids: int64 [w] on the model's device.
            depths: int64 [w]; children of the text's last token have depth 0.
            column_depths: int64 [c], of the nodes fed since `catch_up`, these being the last.
            attends: bool [w, c], which of them each node is or descends from.

        Returns:
            Logits [w, vocab_size].
        """
        return self._forward(token_ids, depths, column_depths, attends, {})

    def keep(self, path: Sequence[int] | Int32Array) -> None:
        """Forget the nodes fed behind the text, except those that the text went on with.

        Args:
            path: their numbers, in the order in which they were fed.
        """
        self._cache.keep([[int(node) for node in path]])

    def rewrite(self, token_ids: Sequence[int]) -> None:
        """Put another text in the text's place; what both begin with stays cached."""
        pairs = zip(self.text, token_ids, strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(self.text))
        self.keep([])
        self._cache.slots.set_lengths([min(self.cached, same, len(token_ids))])
        self.keep([])
        self.text = [int(token) for token in token_ids]

    @torch.no_grad()
    def _forward(
        self,
        token_ids: torch.Tensor,
        depths: NDArray[np.int64],
        column_depths: NDArray[np.int64],
        attends: NDArray[np.bool_],
        options: dict[str, Any],
    ) -> torch.Tensor:
        device = self.model.device
        fed = FedTrees(
            token_ids=token_ids[None],
            depths=torch.from_numpy(depths[None]).to(device),
            attends=torch.from_numpy(attends[None]).to(device),
            max_depth=int(depths[-1]),
            column_depths=torch.from_numpy(column_depths[None]).to(device),
        )
        return self.model(
            input_ids=fed.token_ids,
            attention_mask=self._attention.masks(fed, self._cache.slots),
            position_ids=fed.depths + self.cached,
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
            **options,
        ).logits[0]


@torch.no_grad()
def mask_rules(model: Any) -> dict[str, LayerMask] | LayerMask:
    """The model's mask rules on the tree tier; ValueError where it can only be fed chains."""
    service = choose_service(model, {})
    if service.tier is not Tier.TREE or service.rules is None:
        raise ValueError(
            "expected a draft model that can be fed token trees, got "
            f"{type(model).__name__}: {service.reason}"
        )
    return service.rules
