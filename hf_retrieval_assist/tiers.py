"""Which tier serves a model: decided by its properties and one small test, never by its name."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from .kv_cache import SLOT_LAYERS, SlotCache
from .token_tree import TokenTree
from .tree_attention import LayerMask, TreeAttention, layer_masks, single_mask
from .verification import RowText
from .verifiers import ChainVerifier, ReplayVerifier, TreeVerifier, Verifier

logger = logging.getLogger(__name__)


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
    rules: dict[str, LayerMask] | LayerMask | None = None
    cache_name: str = "past_key_values"

    def verifier(
        self, model: Any, cache: SlotCache, model_kwargs: dict[str, Any], prompt_ids: torch.Tensor
    ) -> Verifier:
        """The verifier of this tier, for one call whose prefill is done."""
        if self.tier is Tier.REPLAY:
            return ReplayVerifier(model, cache, model_kwargs, prompt_ids)
        if self.tier is Tier.CHAIN:
            return ChainVerifier(model, cache, model_kwargs, prompt_ids)
        mask = model_kwargs.get("attention_mask")
        padded = mask is not None and not bool(mask.all())
        attention = TreeAttention(self.rules, mask.bool() if padded else None, model.dtype)
        return TreeVerifier(model, cache, model_kwargs, prompt_ids, attention=attention)


_services: weakref.WeakKeyDictionary[Any, dict[Any, Service]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def choose_service(model: Any, model_kwargs: dict[str, Any]) -> Service:
    """The best tier the model is right at; found once per model and attention implementation."""
    key = (getattr(model.config, "_attn_implementation", None), model.dtype, model.training)
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
    parameters = inspect.signature(model.forward).parameters
    name = next((n for n in ("past_key_values", "cache_params") if n in parameters), None)
    if name is None:
        return [Service(Tier.PLAIN, "its forward takes no cache")]
    if not model._supports_default_dynamic_cache():
        return [Service(Tier.PLAIN, "it does not take a DynamicCache")]
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    if getattr(model, "_is_stateful", False) or any(
        type(layer) not in SLOT_LAYERS for layer in layers
    ):
        return [Service(Tier.REPLAY, "it has a recurrent state", cache_name=name), plain]
    chain = Service(Tier.CHAIN, "")
    if (why := _why_no_tree(model, config, parameters)) is not None:
        return [Service(Tier.CHAIN, why), plain]
    single = Service(Tier.TREE, "one mask", single_mask(config))
    per_type = Service(Tier.TREE, "a mask per layer type", layer_masks(config))
    return [per_type, single, chain, plain] if layer_masks(config) else [single, chain, plain]


def _why_no_tree(model: Any, config: Any, parameters: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if "position_ids" not in parameters:
        return "its forward takes no position_ids"
    if getattr(config, "alibi", False):
        return "alibi counts distances in cache slots"
    if "flash" in (getattr(config, "_attn_implementation", None) or ""):
        return "flash attention takes no tree mask"
    return None


def _tolerance(dtype: torch.dtype) -> float:
    """Largest error, relative to the logits' spread, that rounding explains."""
    return 0.02 if dtype in (torch.float32, torch.float64) else 0.5


# The fed tree: two paths of two nodes below the root. The second is accepted, so that keeping it
# moves slots, and a chain of two goes on from there.
_TREE = TokenTree.build([0, 1, 2, 3], [-1, 0, -1, 2], [1.0] * 4)
_ACCEPTED = [0, 3, 4]


def _fault(model: Any, service: Service, model_kwargs: dict[str, Any]) -> str | None:
    """What goes wrong when the tier verifies drafts on random tokens; None when nothing does.

    The reference is one forward over the whole text without a cache.
    """
    try:
        error = _largest_error(model, service, model_kwargs)
    except Exception as exception:  # whatever an unsuitable model raises, the next tier serves it
        return f"{type(exception).__name__}: {exception}".splitlines()[0][:200]
    limit = _tolerance(model.dtype)
    return None if error <= limit else f"logits off by {error:.2g} of their spread"


def _largest_error(model: Any, service: Service, model_kwargs: dict[str, Any]) -> float:
    probe = _Probe(model, service, model_kwargs)
    chain = service.tier is not Tier.TREE
    ids = probe.random_ids
    if chain:
        # The second of three drafted tokens is rejected, and the text goes on with another one.
        draft = TokenTree.chain(ids[1:4], [1.0] * 3)
        first = probe.step([ids[0]], draft, [0, 1], [ids[1], ids[4]])
        second = probe.step([], TokenTree.chain(ids[5:7], [1.0] * 2), [0, 1, 2], ids[5:8])
        rows = torch.cat([first[:4], second[:3]])
        texts = [ids[:4], [ids[0], ids[1], *ids[4:7]]]
        picks = [(0, [0, 1, 2, 3]), (1, [2, 3, 4])]
    else:
        nodes = ids[1:5]
        tree = TokenTree.build(nodes, _TREE.parents, _TREE.probs)
        first = probe.step([ids[0]], tree, _ACCEPTED, [*nodes[2:], ids[5]])
        second = probe.step([], TokenTree.chain(ids[6:8], [1.0] * 2), [0, 1, 2], ids[6:9])
        rows = torch.cat([first[:5], second[:3]])
        texts = [ids[:3], [ids[0], *nodes[2:], *ids[5:8]]]
        picks = [(0, [0, 1, 2]), (1, [1, 2, 3, 4, 5])]
    expected = torch.cat([probe.reference(texts[text])[positions] for text, positions in picks])
    return float((rows - expected).abs().max() / expected.std())


class _Probe:
    """One row of random tokens decoded by a tier's verifier, beside the reference."""

    def __init__(self, model: Any, service: Service, model_kwargs: dict[str, Any]):
        self.model, self.service = model, service
        config = model.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(0)
        length = _prompt_length(config)
        ids = torch.randint(1, config.vocab_size, (length + 9,), generator=generator)
        self.prompt = ids[None, :length].to(model.device)
        self.random_ids: list[int] = ids[length:].tolist()
        self.extra = {
            name: model_kwargs[name]
            for name in ("encoder_outputs", "attention_mask")
            if model.config.is_encoder_decoder and model_kwargs.get(name) is not None
        }
        rows = len(self.extra["encoder_outputs"][0]) if self.extra else 1
        self.prompt = self.prompt.expand(rows, -1)
        self.rows = [RowText(i, self.prompt[i], 16) for i in range(rows)]
        cache = SlotCache(config)
        self.kwargs = self._arguments(self.prompt.shape[1]) | {
            service.cache_name: cache_for(model, cache),
            "use_cache": True,
        }
        self._call(self.prompt, **self.kwargs)
        cache.begin(rows)
        self.verifier = service.verifier(model, cache, self.kwargs, self.prompt)

    def _arguments(self, length: int) -> dict[str, Any]:
        arguments = dict(self.extra)
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            positions = torch.arange(length, device=self.prompt.device)
            arguments["position_ids"] = positions.expand(len(self.prompt), -1)
        return arguments

    def _call(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        name = "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"
        return self.model(**{name: ids}, **kwargs, return_dict=True).logits

    def reference(self, text: list[int]) -> torch.Tensor:
        """Logits [len(text), vocab_size] of a text behind the prompt, without a cache."""
        suffix = torch.tensor(text, device=self.prompt.device).expand(len(self.prompt), -1)
        ids = torch.cat([self.prompt, suffix], dim=1)
        logits = self._call(ids, **self._arguments(ids.shape[1]), use_cache=False)
        return logits[0, -len(text) :].float()

    def step(
        self, new: list[int], tree: TokenTree, accepted: list[int], tokens: list[int]
    ) -> torch.Tensor:
        """One step of the loop; `new` tokens come first, `tokens` are what it generates."""
        for row in self.rows:
            row.generated += new
        trees = [tree] * len(self.rows)
        outputs, roots = self.verifier.forward(self.rows, trees)
        for row in self.rows:
            row.generated += tokens
        self.verifier.keep(self.rows, [accepted] * len(self.rows))
        return outputs.logits[0, roots[0] :].float()


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
