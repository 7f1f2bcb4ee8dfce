"""DFlash and DSpark heads as published: the layers of transformers' DFlash models, and beside them
what a folder has of its own.

DFlash: arXiv:2602.06036. DSpark (DeepSpec) drafts each slot of a block given the token before it,
by a Markov head, and estimates how likely the draft is accepted there, by a confidence head. DFlash
2 (z-lab) has convolutions round its layers' parts, and a selector in the Markov head's place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from ...draft_models.growth import Chosen, Level
from ...host.transformers_private import compute_device
from ...verification.largest import largest
from .borrowed import BorrowedLayers
from .checkpoints import load_weights
from .published import PublishedHead, Settings, count, layer_settings, number, reading

_LONGEST = 1024  # slots of a block


class BlockHead(nn.Module):
    """What drafts the tokens of a block at once, and whose are the embeddings and the output layer.

    Args:
        body: a DFlash model of transformers, which has none of its own.

    Attributes:
        first: the slot of a block that drafts the next token: 1, since slot 0 holds the last token
            and stands for it; 0 in a head that drafts with all slots.
        causal: whether slots of layers with a window see those before them alone.
        borrowed: the target's embeddings as stored; None: as its own layer gives them, which may
            apply a factor.
        embed_tokens, lm_head: its own; None: the target's.
        markov_head, confidence_head: see :class:`MarkovHead`; how likely drafts are accepted.
        candidate_selector: see :class:`CandidateSelector`.
        embedding_scale, logit_scale: factors of embeddings and of logits.
        softcap: that no logit exceeds; 0: none.
    """

    body: Any
    first, causal = 1, False
    embedding_scale, logit_scale, softcap = 1.0, 1.0, 0.0
    borrowed: BorrowedLayers | None = None
    d2t: Tensor | None  # see `EagleHead`

    def __init__(self, body: Any) -> None:
        super().__init__()
        # Hidden from nn.Module: a folder's tensors have the names of its parts.
        self.__dict__["body"] = body
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        self.markov_head: MarkovHead | None = None
        self.candidate_selector: CandidateSelector | None = None
        self.confidence_head: ConfidenceHead | None = None
        self.register_buffer("d2t", None)

    @property
    def slots(self) -> int:
        """How many tokens of a block are drafted."""
        return int(self.body.config.block_size) - self.first

    @classmethod
    def of(cls, published: PublishedHead, target: Any) -> BlockHead:
        """A head fitted to a transformers model.

        Raises:
            ValueError: it is no head for this target; the message names the first setting or
                tensor that disagrees.
        """
        with torch.device("meta"):
            head = cls(_body(published))
            head._add_parts(published, len(target.get_input_embeddings().weight))
        load_weights(head, published.tensors)
        device = compute_device(target.get_input_embeddings())
        head.to(device, target.dtype).requires_grad_(False).eval()
        with device:
            # No file holds its frequencies, which are no weights.
            head.body.rotary_emb = type(head.body.rotary_emb)(head.body.config)
        theirs = published.is_speculators or published.kind == "dflash2"
        if theirs and head.embed_tokens is None:
            head.borrowed = BorrowedLayers(target)
        return head

    def _add_parts(self, published: PublishedHead, rows: int) -> None:
        """What the folder has, where embeddings have so many rows."""
        settings, body = published.settings, self.body
        if published.kind == "dflash2":
            self._add_convolutions(settings, rows)
        self.fc, self.hidden_norm = body.encoder.fc, body.encoder.output_norm_enc
        self.layers, self.norm = body.layers, body.norm
        width = body.config.hidden_size
        drafted = published.drafted_ids(rows)
        if "embed_tokens.weight" in published.tensors:
            self.embed_tokens = nn.Embedding(rows, width)
        if "lm_head.weight" in published.tensors or drafted != rows:
            self.lm_head = nn.Linear(width, drafted, bias=False)
        if drafted != rows:
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(rows, dtype=torch.bool))
        both_ways = settings.get("sliding_window_non_causal", published.kind == "dflash2")
        self.causal = published.is_speculators and not both_ways
        self.first = 0 if _drafts_with_all_slots(published) else 1
        if published.kind != "dspark":
            return
        rank = count(settings, "markov_rank", 256, least=0)
        if rank:
            kind = settings.get("markov_head_type", "vanilla")
            self.markov_head = MarkovHead(kind, rows, drafted, rank, width)
        if settings.get("enable_confidence_head", True):
            joint = rank if settings.get("confidence_head_with_markov", True) else 0
            self.confidence_head = ConfidenceHead(width + joint)

    def _add_convolutions(self, settings: Settings, rows: int) -> None:
        """What DFlash 2 has besides."""
        width, layers = self.body.config.hidden_size, self.body.layers
        taps = count(settings, "conv_kernel_size", most=self.body.config.block_size)
        group = count(settings, "conv_group_size", most=width)
        if width % group:
            raise ValueError(f"conv_group_size: expected a divisor of {width}, got {group}")
        self.body.layers = nn.ModuleList(ConvolvedLayer(one, width, taps, group) for one in layers)
        rank, top_k = count(settings, "selector_rank"), count(settings, "selector_top_k", most=rows)
        self.candidate_selector = CandidateSelector(rows, rank, width, top_k)
        self.embedding_scale = float(number(settings, "input_embedding_scale", 0, default=1.0))
        self.logit_scale = float(number(settings, "output_multiplier", 0, default=1.0))
        self.softcap = float(number(settings, "final_logit_softcapping", 0, default=0.0))

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits [..., ids] of the output layer as the head was trained with them."""
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return self.softcap * (logits / self.softcap).tanh() if self.softcap else logits

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for columns of the logits; any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def _drafts_with_all_slots(published: PublishedHead) -> bool:
    """DSpark heads do unless they say otherwise, as some do by the number of their drafts alone."""
    settings = published.settings
    stated = settings.get("sample_from_anchor")
    if stated is not None or published.kind != "dspark":
        return bool(stated)
    return published.drafts != count(settings, "block_size") - 1


def _body(published: PublishedHead) -> Any:
    """transformers' DFlash model of the settings, without weights."""
    settings = published.settings
    if published.layers is None:
        raise ValueError("target_layer_ids: expected them in config.json, found none")
    # A layer too many, so that what is missing of it is named.
    layers = min(count(settings, "num_hidden_layers"), published.num_layers + 1)
    kinds, windowed = settings.get("layer_types"), settings.get("use_sliding_window", True)
    if kinds is None or not (windowed and settings.get("sliding_window")):
        kinds = ["full_attention"] * layers
    with reading("DFlash layers"):
        config = MuseGlimmerAssistantConfig(
            **layer_settings(settings),
            num_hidden_layers=layers,
            layer_types=kinds[:layers],
            # That of DFlash 2 counts the token itself.
            sliding_window=count(settings, "sliding_window", 4096) - (published.kind == "dflash2"),
            block_size=count(settings, "block_size", least=2, most=_LONGEST),
            mask_token_id=count(settings, "mask_token_id", least=0),
            target_layer_ids=[layer - 1 for layer in published.layers],
        )
        return MuseGlimmerAssistantModel(config)


class MarkovHead(nn.Module):
    """What a token adds to the logits behind it, by the product of two narrow matrices.

    Args:
        kind: "vanilla"; "gated", by the hidden state too; "rnn", by all tokens of the block.
        vocab_size, draft_vocab_size: ids that may stand before, and that may be drafted.
        rank: of the product (r).
        width: of hidden states.
    """

    def __init__(
        self, kind: str, vocab_size: int, draft_vocab_size: int, rank: int, width: int
    ) -> None:
        super().__init__()
        if kind not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"markov_head_type: expected vanilla, gated or rnn, got {kind!r}")
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Both matrices, [ids, r], of ids that stand before and of those that are drafted."""
        return self.markov_w1.weight, self.markov_w2.weight

    def forward(self, before: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What the second matrix is applied to, and the memory behind a token.

        Args:
            before: [..., r], rows of the first matrix.
            hidden: [..., width] of the slot.
            memory: [..., r], of what stands before; at first 0.
        """
        if self.kind == "vanilla":
            return before, memory
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, before], dim=-1)).sigmoid()
            return gate * before, memory
        joint = self.joint_proj(torch.cat([memory, before, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * memory + (1 - gate) * candidate.tanh()


class CandidateSelector(nn.Module):
    """A `MarkovHead` of DFlash 2, whose product is weighted by the slot's hidden state.

    Args:
        vocab_size, rank, width: as there.
        top_k: ids looked at in each slot.
    """

    def __init__(self, vocab_size: int, rank: int, width: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.predecessor_codebook, self.successor_codebook

    def forward(self, before: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return before * self.hidden_projection(hidden), memory


class Convolution(nn.Module):
    """Mixes each slot of a block with those before it, by weights that it partly makes of the slot.

    Args:
        width: of hidden states.
        taps: slots that are mixed.
        group: neurons whose made weights are one.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // group, bias=False)

    def kernels(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[..., slots, taps, width] twice: for what a part of a layer reads, and what it gives."""
        made = self.kernel_projection(hidden).repeat_interleave(self.group, dim=-1)
        return (self.base_kernel + made.unflatten(-1, self.base_kernel.shape)).unbind(-3)


def convolved(hidden: Tensor, kernel: Tensor) -> Tensor:
    """[rows, slots, width]; what would lie before the first slot counts nothing."""
    slots = hidden.shape[1]
    shifted = [F.pad(hidden, (0, 0, back, 0))[:, :slots] for back in range(kernel.shape[2])]
    return (torch.stack(shifted, dim=2) * kernel).sum(dim=2)


class ConvolvedLayer(nn.Module):
    """A layer of transformers' DFlash models with convolutions round both of its parts."""

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, layer: Any, *sizes: int) -> None:
        super().__init__()
        for name, part in layer.named_children():
            self.add_module(name, part)
        self.attention_conv, self.mlp_conv = Convolution(*sizes), Convolution(*sizes)

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        first, last = self.attention_conv.kernels(normed)
        mixed = self.self_attn(hidden_states=convolved(normed, first), **context)[0]
        hidden_states = hidden_states + convolved(mixed, last)
        normed = self.post_attention_layernorm(hidden_states)
        first, last = self.mlp_conv.kernels(normed)
        return hidden_states + convolved(self.mlp(convolved(normed, first)), last)


class ConfidenceHead(nn.Module):
    """How likely a slot's draft is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits [..., 1] of hidden states of slots, and rows of the Markov head's first matrix,
        which some heads leave out."""
        read = torch.cat([hidden, before], dim=-1)
        return self.proj(read[..., : self.proj.in_features])


class SlotNodes:
    """The nodes of a block whose slots depend on the tokens before them: a `Run` and a `Choice`.

    Only the likeliest ids of each slot get a Markov head's share, which reads a row for each. The
    confidence head's estimate stands for the probability of the first choice; the others share what
    it leaves.

    Args:
        head: with a Markov head or a confidence head.
        states: [rows, slots, hidden_size].
        logits: [rows, slots, ids], without the Markov head.
        last: int64 [rows, 1], the last token of each text.
        top_k: ids looked at in each slot.
    """

    def __init__(
        self, head: BlockHead, states: Tensor, logits: Tensor, last: Tensor, top_k: int
    ) -> None:
        self._head, self._states, self._last = head, states, last
        found = largest(logits.float().log_softmax(dim=-1), top_k)
        self._base, self._columns = (part.to(states.device) for part in found)
        self._ids = head.to_target_ids(self._columns)
        self._memory = states.new_zeros(())

    def run(self, level: Level | None) -> Tensor:
        """float32 [rows, w, top_k], log-probabilities of the slot's ids behind each node."""
        slot, tokens = 0, self._last
        if level is not None:
            slot, tokens = level.depth, level.token_ids
        scores = self._base[:, slot, None]
        hidden = self._states[:, slot, None].expand(-1, tokens.shape[1], -1)
        before = hidden[..., :0]
        markov = self._head.markov_head or self._head.candidate_selector
        if markov is not None:
            before = markov.factors[0][tokens]
            if level is None:
                self._memory = torch.zeros_like(before)
            else:
                parents = level.parent_rows[..., None].expand_as(before)
                self._memory = self._memory.gather(1, parents)
            inner, self._memory = markov(before, hidden, self._memory)
            rest = (1 - scores.exp().sum(-1, keepdim=True)).clamp_min(0).log()
            rows = markov.factors[1][self._columns[:, slot]]
            scores = scores + (inner @ rows.mT).float()
            scores = scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), rest)
        confidence = self._head.confidence_head
        scores = scores.expand(-1, tokens.shape[1], -1)
        if confidence is None:
            return scores
        sure = confidence(hidden, before).float()
        best, first = scores.max(-1, keepdim=True)
        left = logsigmoid(-sure) - (-torch.expm1(best)).clamp_min(1e-6).log()
        return (scores + left).scatter(-1, first, logsigmoid(sure))

    def choose(self, log_probs: Tensor, wanted: int, levels: Any) -> Chosen:
        best, places = log_probs.topk(min(wanted, log_probs.shape[-1]))
        ids = self._ids[:, len(levels), None].expand_as(log_probs).gather(2, places)
        return Chosen(ids, best, best)
