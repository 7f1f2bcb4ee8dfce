"""A call that begins where an earlier one's text was left, and leaves its own to later ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from ..cache.kv_cache import stands_for
from ..cache.prefixes import Prefixes, can_keep
from ..host import transformers_private as private
from ..host.model_key import recording_key
from ..host.ranks import Ranks
from ..policy.policy import DraftingPolicy
from ..policy.stats import CallStats
from ..verification.tiers import Service, has_padding
from .call import Call

# Inputs of the prompt that are known of the tokens of a kept text; and what others may be, whose
# values are compared.
_KNOWN = frozenset(("attention_mask", "position_ids"))
_PLAIN = (torch.Tensor, DynamicCache, bool, int, float, str, type(None))


class KeptPrefix:
    """What one call takes of kept texts, and leaves.

    Args:
        call: of one row whose ids are all that its forwards compute from.
        policy: says whether texts leave anything.
        prefixes: that keep texts.
        cache_name: the forward's keyword for the cache.
    """

    def __init__(
        self, call: Call, policy: DraftingPolicy, prefixes: Prefixes, cache_name: str
    ) -> None:
        self._call, self._policy = call, policy
        self._prefixes, self._cache_name = prefixes, cache_name
        # Read before the first forward: what a call computes is the model's that it began with.
        self._state = self._read()

    @classmethod
    def of(cls, call: Call, policy: DraftingPolicy, service: Service) -> KeptPrefix | None:
        """That of a call; None where it takes and leaves nothing."""
        if policy.prefixes is None or not policy.teaches or not _is_usual(call, service):
            return None
        return cls(call, policy, policy.prefixes, service.cache_name)

    def _read(self) -> Any:
        """What keys and values depend on beside ids: the model, how often its weights were written
        to, and the call's other arguments; None where nobody can tell."""
        model, device = self._call.model, self._call.device
        key = recording_key(model, self._call.model_kwargs, device)
        tensors = (*model.parameters(), *model.buffers())
        return key and (key, [None if x.is_inference() else x._version for x in tensors])

    @property
    def keeps(self) -> bool:
        """Whether the call's cache is kept: nobody else goes on from it."""
        return not self._call.config.return_dict_in_generate

    def take(self, counts: CallStats) -> None:
        """Begin with the longest kept beginning of the prompt; its last token is always read."""
        ids = _listed(self._call.input_ids)
        if self._state is None:
            return
        counts.read_before, cache = self._prefixes.find(self._call.model, self._state, ids[:-1])
        if cache is not None:
            self._call.model_kwargs[self._cache_name] = cache

    def leave(self, text: torch.Tensor, cache: Any) -> None:
        """Keep the call's text, int64 [length], of which the cache holds the first tokens, unless
        texts are to leave nothing by now, the model was changed meanwhile, or it could not go on
        from that cache."""
        kept = self.keeps and self._policy.teaches and can_keep(cache)
        kept = kept and stands_for(cache, self._call.model, 1)
        if kept and self._state is not None and self._read() == self._state:
            held = cache.get_seq_length()
            self._prefixes.keep(self._call.model, self._state, _listed(text)[:held], cache)


def _is_usual(call: Call, service: Service) -> bool:
    """Whether a call is one of a single text, whose keys and values depend on its ids alone: not on
    how long the text was when they were computed."""
    kwargs, length = call.model_kwargs, call.input_ids.shape[1]
    cache, reach = kwargs.get(service.cache_name), service.reach
    tensors = {name: x for name, x in kwargs.items() if isinstance(x, torch.Tensor)}
    positions = tensors.get("position_ids")
    return (
        call.batch_size == 1
        and length > 1
        and cache is not None
        and can_keep(cache)
        and not private.is_callers(cache)
        and not cache.get_seq_length()
        and tensors.keys() <= _KNOWN
        and all(isinstance(x, _PLAIN) for x in kwargs.values())
        and not has_padding(kwargs)
        and (positions is None or _counts(positions, length))
        and not reach.borders
        and reach.apart_from is None
        and call.config.prefill_chunk_size is None
        # Others would have to find as many tokens.
        and not Ranks.of(call.model).several
    )


def _counts(positions: torch.Tensor, length: int) -> bool:
    """Whether positions are those of a text from its first token on."""
    counted = torch.arange(length, device=positions.device)
    return positions.shape[-1] == length and bool((positions == counted).all())


def _listed(ids: torch.Tensor) -> NDArray[np.int64]:
    found: NDArray[np.int64] = ids.reshape(-1).cpu().numpy()
    return found
