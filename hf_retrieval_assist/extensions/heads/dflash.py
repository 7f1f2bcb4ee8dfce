"""Drafts of DFlash and DSpark models: the tokens of a whole block at once, as a tree.

Chen et al. 2026, DFlash: Block Diffusion for Flash Speculative Decoding, arXiv:2602.06036. One
forward over mask tokens behind the text gives the distribution at each of the next positions, none
of which knows what the others will hold, except by the heads that DSpark puts on top.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...draft_models.growth import BestFirst, GrowthLimits, by_probability
from ...draft_models.rows import DraftCache, Group, fed_texts
from ...drafters.base import FeedbackNeeds, Target
from ...host.transformers_private import with_cache
from ...system.arguments import require_at_least
from ...types.token_tree import Float32Array, TokenTree
from ...verification.largest import largest
from ...verification.tree_attention import LayerMask, TreeLayout
from .block_head import BlockHead, SlotNodes
from .features import DFLASH_SETTINGS, FeatureDrafter, FeatureSession, Follower, NewText, is_dflash


class DFlashDrafter(FeatureDrafter):
    """Drafts with a block drafter for the model that is being assisted.

    The tree holds the most probable paths under the product of the positions' distributions; how
    much a probability is worth at its depth and rank is calibrated.

    Args:
        model: a DFlash model of transformers, or a `BlockHead`; shared by all sessions.
        top_k: ids looked at in each position.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.

    Raises:
        ValueError: a size is out of range, or the model is no DFlash model; from `start`, it is
            not one for this target.
    """

    name = "dflash"

    def __init__(self, model: Any, top_k: int = 8, total: int = 60) -> None:
        require_at_least(1, top_k=top_k)
        require_at_least(2, total=total)
        head = model if isinstance(model, BlockHead) else BlockHead(model)
        if not is_dflash(head.body):
            raise ValueError(
                f"model: expected a DFlash model, whose configuration names {DFLASH_SETTINGS}, got "
                f"{type(model).__name__}"
            )
        self.model, self.top_k, self.total = model, top_k, total
        self._head = head
        # A layer's output is the next one's input.
        layers = tuple(layer + 1 for layer in head.body.config.target_layer_ids)
        self.needs = FeedbackNeeds(hidden_layers=layers)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        model, config = target.require_model("DFlashDrafter"), self._head.body.config
        self.require_width("DFlash model", config.hidden_size, model)
        rows = model.get_input_embeddings().weight.shape[0]
        if not 0 <= config.mask_token_id < rows:
            raise ValueError(
                f"DFlash model: expected a mask_token_id below the target's {rows} ids, got "
                f"{config.mask_token_id}"
            )
        if self._head.lm_head is not None:
            target.require_ids("DFlash model", rows - 1)
        follower = BlockFollower(self._head, target, self.top_k)
        return FeatureSession(self, follower, prompt_ids, self.total - 1)


class BlockFollower(Follower):
    """A block drafter behind texts.

    Its cache holds what the target's hidden states gave; the block that a draft puts behind them is
    forgotten when it is done. The newest hidden states are taken in by the draft's own forward.

    Args:
        head: shared with other sessions.
        target: whose embeddings and output layer the head shares.
        top_k: ids looked at in each position.
    """

    def __init__(self, head: BlockHead, target: Target, top_k: int) -> None:
        self._head, self._model, self._top_k = head, head.body, top_k
        if head.candidate_selector is not None:
            self._top_k = head.candidate_selector.top_k
        config = self._model.config
        self.feature_width = len(config.target_layer_ids) * config.hidden_size
        self.device, self.dtype = self._model.device, self._model.dtype
        self._embeddings = target.model.get_input_embeddings()
        self._output = target.model.get_output_embeddings()
        self._vocab_size = target.vocab_size

    def caches(self) -> list[DraftCache]:
        config = self._model.config
        # Its windows reach so many tokens back besides the token itself.
        sliding = LayerMask(window=config.sliding_window and config.sliding_window + 1)
        rules = {"full_attention": LayerMask(), "sliding_attention": sliding}
        return [DraftCache(config, rules, self.dtype)]

    def follow(self, group: Group, text: NewText) -> None:
        self._states(group, text)

    def draft(
        self, group: Group, asked: Sequence[FeatureSession], keep: int
    ) -> Sequence[TokenTree]:
        """The `keep` most probable paths over the next block."""
        texts = list(self.waiting(group, self.chunk)) or [self._nothing(len(group.rows))]
        for text in texts:
            states = self._states(group, text)
        logits, top_k, head = self._logits(states), self._top_k, self._head
        # What a slot drafts depends on the token before it by these.
        if head.markov_head or head.candidate_selector or head.confidence_head:
            nodes = SlotNodes(head, states, logits, self._last_tokens(group), top_k)
            limits = GrowthLimits(top_k, keep, head.slots - 1, keep + 1, min_prob=0.0)
            # An accelerator is not asked after each level what is worth another.
            whole = self.device.type != "cpu"
            growth = BestFirst(limits, keep, choose=nodes.choose, whole=whole)
            growth.grow(nodes.run)
            return growth.grown().trees(by_probability)
        return product_trees(logits, top_k, keep, head.to_target_ids)

    def _nothing(self, rows: int) -> NewText:
        none = np.empty((rows, 0), np.int64)
        features = torch.empty((0, self.feature_width), device=self.device, dtype=self.dtype)
        return NewText([0] * rows, features, none, none, none)

    def _states(self, group: Group, text: NewText) -> Tensor:
        """[rows, slots, hidden_size] behind the texts, whose hidden states are kept."""
        (cache,), size = group.caches, self._model.config.block_size
        width = text.token_ids.shape[1]
        counts, block = torch.tensor(text.counts)[:, None], torch.arange(size)
        column = torch.arange(width + size).expand(len(counts), -1)
        fed = TreeLayout(
            offsets=torch.cat([fed_texts(width - counts, width).offsets, column[:, width:]], dim=1),
            depths=counts + block,
            columns=torch.cat([column[:, :width], counts + block], dim=1),
            sees=((column < counts) | (column >= width))[:, None].expand(-1, size, -1),
        )
        reached = [[0 if row is None else row.reached] for row in group.rows]
        positions = np.concatenate([text.positions, np.array(reached) + block.numpy()], axis=1)
        fed = fed.to(self.device)
        causal = None
        if self._head.causal:
            before = fed.columns[:, None] <= fed.depths[..., None]
            with cache.feeding(fed._replace(sees=fed.sees & before)) as causal:
                pass
        with cache.feeding(fed) as mask:
            if causal is not None:
                mask["sliding_attention"] = causal["sliding_attention"]
            output = self._model(
                noise_embeds=self._block_embeddings(group).to(self.device, self.dtype),
                context_hidden_states=text.features[torch.from_numpy(text.sources).to(self.device)],
                position_ids=torch.from_numpy(positions).to(self.device),
                attention_mask=mask,
                **with_cache(self._model, cache),
            ).last_hidden_state
        cache.keep([range(count) for count in text.counts])
        return output[:, self._head.first :]

    def _logits(self, states: Tensor) -> Tensor:
        """[rows, slots, ids] of the head's output layer, or of the target's."""
        if self._head.lm_head is not None:
            return self._head.scaled(self._head.lm_head(states))
        weight = self._output.weight
        logits = self._output(states.to(weight.device, weight.dtype))[..., : self._vocab_size]
        return self._head.scaled(logits)

    def _last_tokens(self, group: Group) -> Tensor:
        """int64 [rows, 1]."""
        last = [0 if row is None else row.tokens[row.reached] for row in group.rows]
        return torch.tensor(last, device=self.device)[:, None]

    def _block_embeddings(self, group: Group) -> Tensor:
        """[rows, block_size, hidden_size]: last tokens and masks, as embedded without a norm."""
        config, head, layer = self._model.config, self._head, self._embeddings
        last = self._last_tokens(group)
        masks = last.new_full((len(last), config.block_size - 1), config.mask_token_id)
        ids = torch.cat([last, masks], dim=1)
        if head.embed_tokens is not None:
            return head.embed_tokens(ids)
        if head.borrowed is not None:
            return head.borrowed.embed(ids) * head.embedding_scale
        ids = ids.to(layer.weight.device)
        return F.embedding(ids, layer.weight) if hasattr(layer, "embed_norm") else layer(ids)


def product_trees(
    logits: Tensor, top_k: int, keep: int, to_target_ids: Callable[[Tensor], Tensor]
) -> list[TokenTree]:
    """A `product_tree` of each row.

    Args:
        logits: [rows, positions, ids].
        top_k: ids looked at in each position.
        keep: nodes of a tree.
        to_target_ids: from columns of the logits.
    """
    best, ids = largest(logits.float().log_softmax(dim=-1), min(top_k, keep))
    best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    token_ids = to_target_ids(ids.to(logits.device)).cpu().numpy().astype(np.int32)
    return [product_tree(*row, keep) for row in zip(token_ids, best.cpu().numpy(), strict=True)]


def product_tree(token_ids: NDArray[np.int32], log_probs: Float32Array, keep: int) -> TokenTree:
    """The `keep` most probable paths when positions are independent, found best first (Ringel and
    Romano 2026, DDTree, arXiv:2604.12989).

    Args:
        token_ids: int32 [positions, k], the likeliest of each position, best first.
        log_probs: float32 [positions, k], theirs.
        keep: nodes.
    """
    (depths, ranks), costs = token_ids.shape, (-log_probs).tolist()
    nodes: list[tuple[int, int, int]] = []  # parent, depth, rank
    totals: list[float] = []
    # Minus a path's log-probability, then its last node; what lies above it is in the tree.
    heap = [(costs[0][0], -1, 0, 0)]
    while heap and len(nodes) < keep:
        cost, parent, depth, rank = heapq.heappop(heap)
        if cost == math.inf:
            break
        if rank + 1 < ranks:
            sibling = cost - costs[depth][rank] + costs[depth][rank + 1]
            heapq.heappush(heap, (sibling, parent, depth, rank + 1))
        if depth + 1 < depths:
            heapq.heappush(heap, (cost + costs[depth + 1][0], len(nodes), depth + 1, 0))
        nodes.append((parent, depth, rank))
        totals.append(-cost)
    parents, depth_of, rank_of = np.array(nodes, np.int32).reshape(-1, 3).T
    classes = by_probability(log_probs[depth_of, rank_of], rank_of, depth_of + 1)
    return TokenTree.build(token_ids[depth_of, rank_of], parents, np.exp(totals), classes)
