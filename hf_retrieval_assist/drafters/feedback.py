"""What the engine tells an assistant about a row, and what each drafter gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..host.feature_taps import FeatureTaps, HiddenLayers
from ..types.row_text import Path, RowText
from ..types.token_tree import Int32Array, TokenTree
from ..verification.verified import TopLogits, Verified
from .base import Feedback, FeedbackNeeds


@dataclass
class RowFeedback(Feedback):
    """What one forward showed about one row, as far as any drafter asked.

    Attributes:
        states: for each set of layers that a drafter asked for, its `hidden_states`.
    """

    states: dict[HiddenLayers, torch.Tensor] = field(default_factory=dict)


def of_layers(
    feedbacks: Sequence[RowFeedback | None], layers: HiddenLayers
) -> Sequence[Feedback | None]:
    """What a drafter that asked for these layers is told of each row; None: nothing was shown."""
    if not layers:
        return feedbacks
    return [one and replace(one, hidden_states=one.states.get(layers)) for one in feedbacks]


def row_feedbacks(
    rows: Sequence[RowText],
    trees: Sequence[TokenTree],
    paths: Sequence[Path],
    verified: Verified,
    taps: FeatureTaps,
    needs_all_logits: bool,
) -> dict[int, RowFeedback]:
    """What a forward showed about some rows, by their number.

    Args:
        rows: those.
        trees, paths: of every row of the batch.
        verified: of the forward.
        taps: with its hidden states.
        needs_all_logits: whether a drafter wants them.
    """
    chosen = {row.index: paths[row.index].chosen for row in rows}
    states: Sequence[dict[HiddenLayers, torch.Tensor]] = [{}] * len(rows)
    if taps.layers:
        places = [[verified.roots[n] + i for i in nodes] for n, nodes in chosen.items()]
        states = taps.of_rows(places)
    feedbacks = {}
    for row, (n, nodes), seen in zip(rows, chosen.items(), states, strict=True):
        root, ids = row.generated[paths[n].start - 1], trees[n].token_ids.tolist()
        feedbacks[n] = RowFeedback(
            token_ids=np.array([root, *ids], np.int32),
            accepted=np.array(nodes, np.int32),
            parents=np.append(np.int32(-1), trees[n].parents + np.int32(1)),
            logits=verified.of_row(n, len(ids)) if needs_all_logits else None,
            top=verified.top(n, len(ids)),
            states=seen,
        )
    return feedbacks


def prompt_feedback(
    prompt_ids: Int32Array,
    needs: FeedbackNeeds,
    logits: torch.Tensor | None,
    hidden_states: dict[HiddenLayers, torch.Tensor],
) -> Feedback | None:
    """What a drafter is told of the prefill: about as many of the prompt's last tokens as it saw.

    Plain decoding computes the last token's logits alone, so they may be fewer than hidden states.

    Args:
        prompt_ids: int32 [length], without padding.
        needs: the drafter's.
        logits: [rows, vocab_size] of the last positions; None when no drafter asked.
        hidden_states: for each set of layers, [rows, width] of the last positions.
    """
    seen = hidden_states.get(needs.hidden_layers)
    logits = logits if needs.logits or needs.top_k else None
    rows = [len(found) for found in (seen, logits) if found is not None]
    count = min(max(rows, default=0), len(prompt_ids))
    if not count:
        return None
    known = count if seen is None else min(count, len(seen))
    return Feedback(
        prompt_ids[len(prompt_ids) - count :],
        np.arange(count - known, count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        None if logits is None or not needs.logits else logits[-count:],
        None if seen is None else seen[-count:],
        None if logits is None or not needs.top_k else TopLogits(logits[-count:]),
    )
