"""Which tier serves a model: decided by its properties and one small test, never by its name."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from ..decoding.walk import RowText
from ..locks import Lock
from ..token_tree import TokenTree
from .kv_cache import SLOT_LAYERS, SlotCache
from .tree_attention import LayerMask, TreeAttention, layer_masks, single_mask
from .verifiers import (
    ChainVerifier,
    ConvolutionVerifier,
    ReplayVerifier,
    TreeVerifier,
    Verifier,
    input_device,
)

logger = logging.getLogger(__name__)


REPLAYS_ONE_ROW = (
    "rows with recurrent states accept different numbers of tokens, but replay in step"
)


class Tier(str, Enum):
    """How drafts are verified, best first."""

    TREE = "tree"
    CHAIN = "chain"
    REPLAY = "replay"
    PLAIN = "plain"


@dataclass(frozen=True)
class Service:
    """How a model is served.

    Attributes:
        tier: see :class:`Tier`.
        reason: in words, for the log.
        rules: mask rules of the tree tier, per layer type or one for all.
        cache_name: the forward's keyword for the cache.
    """

    tier: Tier
    reason: str
    rules: dict[str, LayerMask] | LayerMask = field(default_factory=LayerMask)
    cache_name: str = "past_key_values"

    def verifier(
        self, model: Any, cache: SlotCache, model_kwargs: dict[str, Any], prompt_ids: torch.Tensor
    ) -> Verifier:
        """The verifier of this tier, for one call whose prefill is done."""
        if self.tier is Tier.REPLAY:
            return ReplayVerifier(model, cache, model_kwargs, prompt_ids)
        if self.tier is Tier.CHAIN:
            chain = ConvolutionVerifier if cache.state_layers else ChainVerifier
            return chain(model, cache, model_kwargs, prompt_ids)
        mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        if mask is not None:
            mask = None if bool(mask.all()) else mask.bool().to(input_device(model, mask))
        attention = TreeAttention(self.rules, mask, model.dtype)
        return TreeVerifier(model, cache, model_kwargs, prompt_ids, attention=attention)


_services: weakref.WeakKeyDictionary[Any, dict[Any, Service]] = weakref.WeakKeyDictionary()
_lock = Lock()


def choose_service(model: Any, model_kwargs: dict[str, Any]) -> Service:
    """The best tier the model is right at.

    Found once per model, attention implementation and dtype, and once more for padded batches.
    """
    key = (
        getattr(model.config, "_attn_implementation", None),
        model.dtype,
        model.training,
        _has_padding(model_kwargs),
    )
    with _lock:
        known = _services.setdefault(model, {})
        if key not in known:
            known[key] = _first_right(model, model_kwargs)
            logger.info(
                "%s: %s (%s)", type(model).__name__, known[key].tier.value, known[key].reason
            )
        return known[key]


def _first_right(model: Any, model_kwargs: dict[str, Any]) -> Service:
    reason = ""
    for service in _candidates(model):
        if service.tier is Tier.REPLAY and _has_padding(model_kwargs):
            reason = REPLAYS_ONE_ROW
            continue
        if service.tier is Tier.PLAIN:
            return Service(Tier.PLAIN, "; ".join(filter(None, (service.reason, reason))))
        fault = _fault(model, service, model_kwargs)
        if fault is None:
            return Service(
                service.tier, reason or service.reason, service.rules, service.cache_name
            )
        reason = f"{service.tier.value} failed its test: {fault}"
    raise AssertionError("the last candidate is the plain tier")


def _candidates(model: Any) -> list[Service]:
    """Tiers that the model's properties allow, best first; the last one is plain."""
    plain = Service(Tier.PLAIN, "")
    parameters = _forward_parameters(model)
    name = next((n for n in ("past_key_values", "cache_params") if n in parameters), None)
    if name is None:
        return [Service(Tier.PLAIN, "its forward takes no cache")]
    if not model._supports_default_dynamic_cache():
        return [Service(Tier.PLAIN, "it does not take a DynamicCache")]
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    stateful = getattr(model, "_is_stateful", False)
    if stateful or any(type(layer) not in SLOT_LAYERS for layer in layers):
        replay = Service(Tier.REPLAY, "it has a recurrent state", cache_name=name)
        convolution = Service(Tier.CHAIN, "it has a convolution state", cache_name=name)
        return [replay, plain] if stateful else [convolution, replay, plain]
    chain = Service(Tier.CHAIN, "")
    if (why := _why_no_tree(model, config, parameters)) is not None:
        return [Service(Tier.CHAIN, why), plain]
    single = Service(Tier.TREE, "one mask", single_mask(config))
    per_type = Service(Tier.TREE, "a mask per layer type", layer_masks(config))
    return [per_type, single, chain, plain] if layer_masks(config) else [single, chain, plain]


def _forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Of the class's forward: an instance's may be wrapped by hooks that take anything."""
    return inspect.signature(type(model).forward).parameters


def _why_no_tree(model: Any, config: Any, parameters: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if "position_ids" not in parameters:
        return "its forward takes no position_ids"
    if getattr(config, "alibi", False):
        return "alibi counts distances in cache slots"
    attention = getattr(config, "_attn_implementation", None) or ""
    if "flash" in attention:
        return "flash attention takes no tree mask"
    if "flex" in attention:
        # Its kernel, compiled for a CPU, writes past its buffers when given a mask as a tensor.
        return "flex attention takes block masks only"
    return None


def _tolerance(dtype: torch.dtype) -> float:
    """Largest error, relative to the logits' spread, that rounding explains."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.2


# The fed tree: two paths of two nodes below the root. When the second is accepted, keeping it moves
# slots. The chain tiers get three nodes in a row, the last of them wrong.
_TREE_PARENTS = [-1, 0, -1, 2]

# Tokens that rows generate in the three steps of the test. Rows of a batch differ, so that their
# progress does.
_PROGRESS = ((3, 3, 1), (1, 2, 1))


def _fault(model: Any, service: Service, model_kwargs: dict[str, Any]) -> str | None:
    """What goes wrong when the tier verifies drafts on random tokens; None when nothing does.

    The reference is what plain decoding does: one token per forward from a cache of its own.
    """
    try:
        error = _largest_error(model, service, model_kwargs)
    except Exception as exception:  # whatever an unsuitable model raises, the next tier serves it
        return f"{type(exception).__name__}: {exception}".splitlines()[0][:200]
    limit = _tolerance(model.dtype)
    return None if error <= limit else f"logits off by {error:.2g} of their spread"


@torch.no_grad()
def _largest_error(model: Any, service: Service, model_kwargs: dict[str, Any]) -> float:
    """Over three steps: a draft that is rejected in part, one that is accepted, and none."""
    probe = _Probe(model, service, model_kwargs)
    actual = [probe.step(number) for number in range(3)]
    expected = probe.reference()
    error = 0.0
    for row, texts in enumerate(zip(*actual, strict=True)):
        logits = torch.cat(texts)
        # NaN, which compares as no error, is one.
        errors = (logits - expected[row, : len(logits)]).abs().nan_to_num(nan=torch.inf)
        error = max(error, float(errors.max() / expected[row].std()))
    return error


class _Probe:
    """Rows of random tokens decoded by a tier's verifier, beside plain decoding of the same.

    Calls with padding or several rows are probed with two rows, one of them padded.
    """

    def __init__(self, model: Any, service: Service, model_kwargs: dict[str, Any]):
        self.model, self.service = model, service
        self.config = model.config.get_text_config(decoder=True)
        self.extra: dict[str, Any] = {}
        rows = 1
        if model.config.is_encoder_decoder:
            names = ("encoder_outputs", "attention_mask")
            self.extra = {n: model_kwargs[n] for n in names if model_kwargs.get(n) is not None}
            rows = len(self.extra["encoder_outputs"][0])
        elif _has_padding(model_kwargs):
            rows = 2
        generator = torch.Generator().manual_seed(0)
        length = _prompt_length(self.config)
        ids = torch.randint(1, self.config.vocab_size, (rows, length + 10), generator=generator)
        self.prompt = ids[:, :length].to(_device(model))
        # Per row the text, and behind it a token that is drafted wrongly.
        self.texts: list[list[int]] = ids[:, length:].tolist()
        self.mask = torch.ones_like(self.prompt)
        if rows == 2 and not self.extra:
            self.mask[1, :3] = 0
        self.rows = [RowText(i, self.prompt[i], 16) for i in range(rows)]
        for row, text in zip(self.rows, self.texts, strict=True):
            row.generated.append(text[0])
        cache = SlotCache(self.config)
        kwargs, _ = self._prefill(cache)
        cache.begin(rows)
        self.verifier = service.verifier(model, cache, kwargs, self.prompt)

    def _prefill(self, cache: DynamicCache) -> tuple[dict[str, Any], Any]:
        """The keyword arguments of the steps to come, and the outputs for the prompt."""
        kwargs = self.extra | {
            self.service.cache_name: cache_for(self.model, cache),
            "use_cache": True,
        }
        if not self.model.config.is_encoder_decoder:
            kwargs["attention_mask"] = self.mask
            if "position_ids" in _forward_parameters(self.model):
                kwargs["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)
        inputs = self.model.prepare_inputs_for_generation(
            self.prompt, is_first_iteration=True, **kwargs
        )
        return kwargs, self.model(**inputs, return_dict=True)

    def reference(self) -> torch.Tensor:
        """Logits [rows, tokens, vocab_size] of plain decoding, the texts being fed."""
        model, ids = self.model, self.prompt
        kwargs, outputs = self._prefill(DynamicCache(config=self.config))
        logits = []
        for tokens in list(zip(*self.texts, strict=True))[: sum(_PROGRESS[0])]:
            kwargs = model._update_model_kwargs_for_generation(
                outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder
            )
            ids = torch.cat([ids, ids.new_tensor(tokens)[:, None]], dim=1)
            inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
            outputs = model(**inputs, return_dict=True)
            logits.append(outputs.logits[:, -1].float())
        return torch.stack(logits, dim=1)

    def step(self, number: int) -> list[torch.Tensor]:
        """One step of the loop.

        Returns:
            For each row, logits [accepted tokens, vocab_size].
        """
        plans = [self._plan(row, number) for row in self.rows]
        outputs, roots = self.verifier.forward(self.rows, [tree for tree, _ in plans])
        for row, (_, accepted) in zip(self.rows, plans, strict=True):
            text, done = self.texts[row.index], len(row.generated)
            row.generated += text[done : done + len(accepted)]
        self.verifier.keep(self.rows, [accepted for _, accepted in plans])
        return [
            outputs.logits[row.index, roots[row.index] :][accepted].float()
            for row, (_, accepted) in zip(self.rows, plans, strict=True)
        ]

    def _plan(self, row: RowText, number: int) -> tuple[TokenTree, list[int]]:
        """A row's draft in a step, and the fed tokens of it that will be accepted."""
        text = self.texts[row.index]
        tokens = _PROGRESS[row.index % 2][number]
        # Up to here the draft is right; then it goes wrong.
        known = text[len(row.generated) :][: tokens - 1]
        right = known + [text[-1]] * (2 - len(known))
        if number == 2:
            return TokenTree.empty(), [0]
        if number == 1:
            return TokenTree.chain(right, [1.0] * 2), list(range(tokens))
        if self.service.tier is not Tier.TREE:
            return TokenTree.chain([*right, text[-1]], [1.0] * 3), list(range(tokens))
        tree = TokenTree.build([text[-1], text[-2], *right], _TREE_PARENTS, [1.0] * 4)
        return tree, [0, 3, 4][:tokens]


def _device(model: Any) -> torch.device:
    """Where the model computes; with offloaded weights its parameters are elsewhere."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return model.device if device is None else torch.device(device)


def _has_padding(model_kwargs: dict[str, Any]) -> bool:
    """Whether rows may be padded: a batch, or a mask that hides something."""
    mask = model_kwargs.get("attention_mask")
    return mask is not None and (len(mask) > 1 or not bool(mask.all()))


def _prompt_length(config: Any) -> int:
    """Longer than any local window that the masks do not know of, where that is affordable."""
    windows = [
        value
        for name, value in config.to_dict().items()
        if "window" in name and name != "sliding_window" and isinstance(value, int)
    ]
    return max([8, *(w + 2 for w in windows if w <= 1024)])


def cache_for(model: Any, cache: SlotCache) -> Any:
    """The cache object that the model's forward expects around its self-attention cache."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache())
    return cache
