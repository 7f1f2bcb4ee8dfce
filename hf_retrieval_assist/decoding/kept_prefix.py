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

# Inputs with an entry for each token that say nothing where all of them are 0.
_TYPES = frozenset(("token_type_ids", "mm_token_type_ids"))
# Inputs of the prompt that are known of the tokens of a kept text; and what others may be, whose
# values are compared.
_KNOWN = frozenset(("attention_mask", "position_ids", *_TYPES))
_SMALL = 512  # numbers of a tensor that are compared themselves
_PLAIN = (torch.Tensor, DynamicCache, bool, int, float, str, type(None))


class KeptPrefix:
    """What one call takes of kept texts, and leaves.

    Args:
        call: of one row whose ids are all that its forwards compute from.
        policy: says whether texts leave anything.
        prefixes: that keep texts.
        service: how the model is served.
    """

    def __init__(
        self, call: Call, policy: DraftingPolicy, prefixes: Prefixes, service: Service
    ) -> None:
        self._call, self._policy = call, policy
        self._prefixes, self._service = prefixes, service
        # Read before the first forward: what a call computes is the model's that it began with.
        self._state = self._read()

    @classmethod
    def of(
        cls, call: Call, policy: DraftingPolicy, service: Service, counts: CallStats
    ) -> KeptPrefix | None:
        """That of a call; None where it takes and leaves nothing, which its figures explain."""
        if policy.prefixes is None or not policy.teaches:
            return None
        counts.why_unread = _why_unread(call, service)
        return None if counts.why_unread else cls(call, policy, policy.prefixes, service)

    def _read(self) -> Any:
        """What keys and values depend on beside ids: the model, how often its weights were written
        to, and the call's other arguments; None where nobody can tell."""
        model, device = self._call.model, self._call.device
        # A new empty container, which the model makes in each call, is the same.
        arguments = {n: x for n, x in self._call.model_kwargs.items() if isinstance(x, _PLAIN)}
        key = recording_key(model, arguments, device)
        written = [*map(_version, model.parameters()), *map(_content, model.buffers())]
        return key and (key, written)

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
            self._call.model_kwargs[self._service.cache_name] = cache

    def leave(self, text: torch.Tensor, cache: Any) -> None:
        """Keep the call's text, int64 [length], of which the cache holds the first tokens, unless
        texts are to leave nothing by now, the model was changed meanwhile, or it could not go on
        from that cache."""
        if not (self.keeps and self._policy.teaches and can_keep(cache)):
            return
        model, held = self._call.model, cache.get_seq_length()
        if not stands_for(cache, model, 1) or self._service.why_whole(model, cache, held):
            return
        if self._state is not None and self._read() == self._state:
            self._prefixes.keep(model, self._state, _listed(text)[:held], cache)


def _version(tensor: torch.Tensor) -> int | None:
    """How often it has been written to, where that is counted."""
    return None if tensor.is_inference() else tensor._version


def _content(buffer: torch.Tensor) -> Any:
    """What is in a small one, to which forwards write the same frequencies again."""
    readable = buffer.numel() <= _SMALL and not buffer.is_meta
    return buffer.tolist() if readable else _version(buffer)


def _why_unread(call: Call, service: Service) -> str:
    """Why no text is taken, or kept; empty where a call is one of a single text, whose keys and
    values depend on its ids alone: not on how long the text was when they were computed."""
    kwargs, length = call.model_kwargs, call.input_ids.shape[1]
    cache = kwargs.get(service.cache_name)
    tensors = {name: x for name, x in kwargs.items() if isinstance(x, torch.Tensor)}
    positions = tensors.get("position_ids")
    others = tensors.keys() - _KNOWN | {n for n, x in kwargs.items() if not _is_plain(x)}
    others |= {name for name in tensors.keys() & _TYPES if bool(tensors[name].any())}
    if call.batch_size > 1:
        return "it has several rows"
    if cache is None or private.is_callers(cache) or cache.get_seq_length():
        return "its cache is the caller's"
    if not can_keep(cache):
        return "its layers keep more than keys and values of single tokens"
    if others:
        return f"its forward is given {', '.join(sorted(others))}"
    if has_padding(kwargs) or not (positions is None or _counts(positions, length)):
        return "its tokens are padded, or counted otherwise than from the first one on"
    if why := service.why_whole(call.model, cache, length):
        return why
    if call.config.prefill_chunk_size is not None:
        return "it reads its prompt in chunks (prefill_chunk_size)"
    # Others would have to find as many tokens.
    return "several processes compute the model" if Ranks.of(call.model).several else ""


def _is_plain(x: Any) -> bool:
    """Whether an argument is nothing but a value that can be compared, or an empty container."""
    return isinstance(x, _PLAIN) or (isinstance(x, (dict, list, tuple)) and not x)


def _counts(positions: torch.Tensor, length: int) -> bool:
    """Whether positions are those of a text from its first token on."""
    counted = torch.arange(length, device=positions.device)
    return positions.shape[-1] == length and bool((positions == counted).all())


def _listed(ids: torch.Tensor) -> NDArray[np.int64]:
    found: NDArray[np.int64] = ids.reshape(-1).cpu().numpy()
    return found
