"""Residual sampling: drafts drawn without replacement, verified so that the law stays the target's.

Sequoia (Chen et al. 2024, section 3.2, algorithm 1). The children of a node are drawn one after the
other from the draft's distribution Q without replacement; each is accepted with probability
min(1, R[x]/D[x]), where R is what is left of the target's distribution P and D of Q. Whatever the
draws, the token that comes out is distributed as P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# log-probability of tokens that Q never draws: below any that a float32 softmax can give, and near
# enough that float64 keys keep the order of their noise.
_EXCLUDED = -1e4
# A smaller residual is what rounding leaves where both laws agree, and no law to sample from.
_NO_RESIDUAL = 1e-12


@dataclass(frozen=True)
class ChildDraw:
    """What residual verification must know of a node.

    Attributes:
        draft: [vocab_size], the distribution its children were drawn from.
        children: int64 [k], the tokens, in the order drawn without replacement.
    """

    draft: torch.Tensor
    children: torch.Tensor


def draw_children(
    probs: torch.Tensor, count: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw children without replacement from each node's draft distribution.

    The largest keys log q + Gumbel noise are such a draw, in its order (Efraimidis and Spirakis).
    Once the support of Q is used up, the other tokens follow in uniformly random order.

    Args:
        probs: [..., vocab_size], Q of each node; rows need not be normalised.
        count: children per node, at most vocab_size.
        generator: source of the noise, on the device of `probs`.

    Returns:
        int64 [..., count], in the order drawn.
    """
    noise = torch.empty_like(probs, dtype=torch.float64).exponential_(generator=generator)
    weights = probs.double()
    keys = torch.where(weights > 0, weights.log(), _EXCLUDED) - noise.log()
    return keys.topk(count, dim=-1).indices


def child_acceptance(
    target: torch.Tensor, draft: torch.Tensor, children: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule of one node: what each child is accepted with, and from what to sample otherwise.

    Args:
        target: [..., vocab_size], P after temperature, top-p and the like.
        draft: [..., vocab_size], the Q that the children were drawn from.
        children: int64 [..., k], in the order drawn.

    Returns:
        float64 [..., k], the probability to accept each child given that those before it were
        rejected; and float64 [..., vocab_size], the distribution of the token given that all were.
        Nothing waits for the device.
    """
    residual, proposal = _normalised(target.double()), draft.double()
    remaining = torch.ones_like(proposal)
    rates = []
    for child in children.unbind(-1):
        # Children are drawn uniformly from all other tokens where the support of Q is used up; so
        # they are from the beginning where Q is not a number.
        used_up = ~(proposal.sum(-1, keepdim=True) > 0)
        proposal = _normalised(torch.where(used_up, remaining, proposal))
        token = child.unsqueeze(-1)
        rate = residual.gather(-1, token) / proposal.gather(-1, token)
        rates.append(rate.nan_to_num(nan=0.0).clamp(max=1.0))
        # The token has not left the proposal yet: its own residual is part of the rule.
        left = (residual - proposal).clamp_min(0)
        mass = left.sum(-1, keepdim=True)
        residual = torch.where(mass < _NO_RESIDUAL, residual, left / mass.clamp_min(_NO_RESIDUAL))
        remaining = remaining.scatter(-1, token, 0.0)
        proposal = proposal.scatter(-1, token, 0.0)
    none = target.new_empty((*children.shape[:-1], 0), dtype=torch.float64)
    return (torch.cat(rates, dim=-1) if rates else none), residual


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Rows that sum to 1; rows without any weight stay 0."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def verify_node(
    target: torch.Tensor,
    draft: torch.Tensor,
    children: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[int, int]:
    """Choose the token after one node so that its law is the target's.

    Args:
        target: [vocab_size], P; see `child_acceptance`.
        draft: [vocab_size], Q; not looked at when there are no children.
        children: int64 [k], tokens in the order drawn; all that were drawn, verified or not.
        generator: on the device of `target`. Draws k + 1 numbers, all fresh.

    Returns:
        The accepted child's place in `children` (−1: none), and the token.
    """
    rates, residual = child_acceptance(target, draft, children)
    draws = torch.rand(rates.shape, dtype=rates.dtype, device=rates.device, generator=generator)
    otherwise = torch.multinomial(residual, 1, generator=generator)
    # One transfer: whether each child passes, and the token if none does.
    *passes, token = torch.cat([(draws < rates).long(), otherwise]).tolist()
    if 1 in passes:
        rank = passes.index(1)
        return rank, int(children[rank])
    return -1, token
