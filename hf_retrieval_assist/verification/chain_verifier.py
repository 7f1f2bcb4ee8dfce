"""How one forward checks a chain of each row, for models without usable positions or masks.

All rows advance by what the slowest one accepted; what faster rows know already stays pending.
Slots forget by themselves; what layers keep besides, :mod:`..cache.states` takes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..cache.states import SavedStates, States
from ..types.row_text import RowText
from ..types.token_tree import Forest
from .tiers import Tier
from .verified import Verified
from .verifier import Verifier


class ChainVerifier(Verifier):
    """Verifies one chain per row, all rows in lockstep; see the module's docstring.

    Attributes:
        states: what layers keep beside slots.
    """

    chains = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        saves = self.service.tier is Tier.REPLAY
        self.states = SavedStates(self.cache) if saves else States(self.cache)

    def _pending(self, row: RowText) -> list[int]:
        """Tokens of the row that the cache does not hold; the last one is the draft's root."""
        done = self.processed[row.index]
        return row.fed(done, max(len(row.generated), done + 1))

    def _backlog(self, rows: Sequence[RowText]) -> tuple[int, int]:
        backlog = max(len(self._pending(row)) for row in rows) - 1
        return backlog, 0 if self.states.full else self.most_fed - 1

    def forward(self, rows: Sequence[RowText], trees: Forest) -> Verified:
        pending = [self._pending(row) for row in rows]
        fed = [
            [*known, *tree.token_ids.tolist()] for known, tree in zip(pending, trees, strict=True)
        ]
        width = max(len(tokens) for tokens in fed)
        # Filler stands behind everything that matters and is cut off again by `keep`.
        for row, tokens in zip(rows, fed, strict=True):
            done = self.processed[row.index] + len(tokens)
            tokens += row.fed(done, done + width - len(tokens))
        # What a finished row is fed, for other processes, is not kept either.
        self.states.begin(undo=len(trees.token_ids) > 0 or rows[0].finished)
        return self._feed(rows, fed, [len(known) - 1 for known in pending])

    def _feed(
        self, rows: Sequence[RowText], fed: Sequence[Sequence[int]], roots: Sequence[int]
    ) -> Verified:
        width = len(fed[0])
        input_ids = torch.tensor(fed, device=self.prompt_ids.device)
        if self._steady is None:
            # What models prepare may depend on the whole text.
            texts = [self._cached_ids(row) for row in rows]
            input_ids = torch.cat([torch.cat(texts), input_ids], dim=1)
        outputs = self._run(input_ids.to(self.device), width, self._causal_arguments(width))
        return Verified(outputs.logits, roots, outputs)

    def _cached_ids(self, row: RowText) -> torch.Tensor:
        """int64 [1, tokens in the cache] of a row."""
        done, known = self.processed[row.index], len(row.generated)
        length = self.prompt_ids.shape[1] + done
        if done <= known:
            return row.ids[:, :length]
        return torch.cat([row.ids, row.ids.new_tensor([row.fed(known, done)])], dim=1)

    def _causal_arguments(self, width: int) -> dict[str, torch.Tensor]:
        generated = self.processed[0]
        arguments = {}
        name = (
            "decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask"
        )
        if (mask := self.kwargs.get(name)) is not None:
            arguments[name] = F.pad(mask, (0, generated + width), value=1)
        if self.positions is not None:
            steps = torch.arange(generated, generated + width, device=self.device)
            arguments["position_ids"] = self.next_position + steps
        return arguments

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        # All that was fed of a row without a path is its text or its padding.
        valid = [
            len(row.generated) - 1 - self.processed[row.index] if path else verified.width
            for row, path in zip(rows, accepted, strict=True)
        ]
        self._advance(min(valid) if any(map(len, accepted)) else 0, verified)

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        done = self.processed[0]
        width = min(tokens - 1 - done, self._most_lacking)
        fed = [row.fed(done, done + width) for row in rows]
        self.states.begin(undo=False)
        self._advance(width, self._feed(rows, fed, [0] * len(rows)))

    def _advance(self, tokens: int, verified: Verified) -> None:
        """Keep the first tokens that a forward fed."""
        tokens = self.states.keep(tokens, verified.width)
        self.cache.keep([range(tokens)] * len(self.prompt_ids))
        self.feeding = False

    def end(self, tokens: int) -> None:
        dropped = max(0, self.processed[0] - (tokens - 1))
        super().end(tokens)
        self.states.end(dropped)

    def undo(self) -> None:
        self.cache.truncate(self.cache.slots.longest)
        self.cache.zero_unused()
        self.states.undo(self.feeding)
        self.feeding = False

    def abandon(self) -> None:
        super().abandon()
        self.states.undo(self.feeding)
        self.states.end(0)
