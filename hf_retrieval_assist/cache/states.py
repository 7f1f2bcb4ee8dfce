"""How layers forget what they keep beside slots: convolution states and other recurrent ones."""

from __future__ import annotations

import copy
from typing import Any

from transformers.cache_utils import LinearAttentionLayer

from .kv_cache import SlotCache
from .slot_layers import HybridSlotLayer, SlotLayer, state_beside_slots

# A recurrent model gets more pending tokens than this without a draft behind, which always
# succeeds: it bounds the width that replaying adds to every forward.
_MAX_REPLAY = 16


class States:
    """States of a cache of slots, which forget by themselves, and of convolutions, which record
    those of a forward's tokens.

    They are cropped before the next forward, since `end` may drop more of them than `keep`.

    Attributes:
        full: whether a forward must be kept whole, whatever it feeds.

    Raises:
        ValueError: a layer's state cannot be cropped.
    """

    full = False

    def __init__(self, cache: SlotCache):
        self.cache, self._excess = cache, 0
        for layer in cache.state_layers:
            if not layer.is_croppable:
                raise ValueError("its recurrent state cannot be cropped")
            layer.activate_past_recording()

    def begin(self, undo: bool) -> None:
        """A forward begins, not all of which may be kept where it is to be undone."""
        self._crop()

    def keep(self, tokens: int, fed: int) -> int:
        """Keep the first `tokens` of those that a forward fed, or roll it back; returns how many
        are kept."""
        self._excess = fed - tokens
        return tokens

    def end(self, dropped: int) -> None:
        """Leave states as plain decoding does, without so many tokens kept last."""
        self._excess += dropped
        self._crop()
        for layer in self.cache.state_layers:
            layer.record_past = False
            for number, states in layer.conv_states.items():
                layer.conv_states[number] = states.contiguous()

    def undo(self, feeding: bool) -> None:
        """Go back to before a forward that was interrupted; `feeding`: whether it had begun."""
        if feeding:
            # Blocks that the forward had reached hold all that it fed.
            for layer in self.cache.state_layers:
                grown = layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
                LinearAttentionLayer.crop(layer, -grown)
            self._excess = 0

    def _crop(self) -> None:
        for layer in self.cache.state_layers:
            LinearAttentionLayer.crop(layer, -self._excess)
        self._excess = 0


class SavedStates(States):
    """States of recurrences, which cannot forget single tokens: they go back to before the forward,
    and its accepted tokens, fed once more, share the next one."""

    def __init__(self, cache: SlotCache):
        self.cache, self._backlog = cache, 0
        self._saved: list[dict[str, Any]] | None = None

    @property
    def full(self) -> bool:  # type: ignore[override]
        return self._backlog >= _MAX_REPLAY

    def begin(self, undo: bool) -> None:
        self._saved = [state_of(layer) for layer in self.cache.layers] if undo else None

    def keep(self, tokens: int, fed: int) -> int:
        if tokens == fed:
            self._backlog = 0
        else:
            self._backlog = tokens
            self._restore()
        self._saved = None
        return 0 if self._backlog else tokens

    def end(self, dropped: int) -> None:
        pass

    def undo(self, feeding: bool) -> None:
        if feeding and self._saved is None:
            # The state may have gone half a step, and cannot go back.
            self.cache.clear()
        elif feeding:
            self._restore()

    def _restore(self) -> None:
        assert self._saved is not None
        for layer, state in zip(self.cache.layers, self._saved, strict=True):
            layer.__dict__.update(state)


def state_of(layer: Any) -> dict[str, Any]:
    """What a forward changes in a layer, copied where it changes in place.

    Slots forget by themselves. `keys` and `values` of other layers grow by concatenation, which
    leaves the old tensors as they are.
    """
    if isinstance(layer, HybridSlotLayer):
        return copy.deepcopy(state_beside_slots(layer))
    if isinstance(layer, SlotLayer):
        return {}
    grown = {name: layer.__dict__[name] for name in ("keys", "values") if name in layer.__dict__}
    rest = {name: value for name, value in layer.__dict__.items() if name not in grown}
    return copy.deepcopy(rest) | grown
