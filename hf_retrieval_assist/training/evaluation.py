"""How many tokens a step a head brings, on recorded texts and without timing anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..drafters.base import Drafter, DraftSession, Feedback, Target
from ..host.feature_taps import FeatureTap


def mean_accepted_tokens(
    drafter: Drafter,
    target: Any,
    requests: Iterable[tuple[Sequence[int], Sequence[int]]],
    budget: int = 60,
) -> float:
    """Tokens per verification step, the target's own one included, over recorded requests.

    The target runs once over each text, because a causal model's features of a token do not
    depend on what follows; then the text is replayed with a verifier that knows it.

    Args:
        drafter: of a head.
        target: the transformers model that it drafts for.
        requests: (prompt ids, output ids) pairs; the prefill gives the first output token.
        budget: nodes of a draft.
    """
    steps = tokens = 0
    for prompt, output in requests:
        text = np.array([*prompt, *output], np.int32)
        steps += _replay(drafter, target, text, len(prompt), budget)
        tokens += len(output) - 1
    return tokens / max(steps, 1)


def _replay(drafter: Drafter, target: Any, text: np.ndarray, known: int, budget: int) -> int:
    """Steps for what follows the first `known` tokens and the one that the prefill gives."""
    with torch.no_grad(), FeatureTap(target, drafter.needs.hidden_layers) as tap:
        output = target(torch.tensor(text[None], device=target.device, dtype=torch.long))
    model = Target(vocab_size=output.logits.shape[-1], device=target.device, model=target)
    session = drafter.start(text[:known], model)
    features, steps = tap.features[0], 0
    _commit(session, text[known : known + 1], text[:known], features[:known])
    known += 1
    while known < len(text):
        # The last token needs no node: the step that reaches its parent gives it.
        accepted = len(session.propose(budget).follow(text[known:-1]))
        fed = slice(known - 1, known + accepted)
        _commit(session, text[known : fed.stop + 1], text[fed], features[fed])
        known, steps = fed.stop + 1, steps + 1
    session.close()
    return steps


def _commit(
    session: DraftSession, new: np.ndarray, fed: np.ndarray, features: torch.Tensor
) -> None:
    accepted = np.arange(len(fed), dtype=np.int32)
    session.commit(new.tolist(), Feedback(fed, accepted, hidden_states=features))
