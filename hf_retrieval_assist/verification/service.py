"""Which tier serves a model: decided by its properties and one small test, never by its name."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache

from ..cache.kv_cache import SLOT_LAYERS
from ..host.callers_code import has_callers_code, why_code_is_unknown
from ..host.model_key import Moving, attributes_of, note_moves, structure_of
from ..host.plain_step import why_other_loop
from ..host.private_names import why_plain
from ..host.ranks import Ranks
from ..host.scopes import is_exchangeable
from ..host.transformers_private import (
    CACHE,
    attention_of,
    cache_name,
    checkpoints_activations,
    hooks_of,
    input_device,
    is_pipeline,
    is_stateful,
    takes_dynamic_cache,
    takes_positions,
    why_no_mask,
    why_plain_in_pipeline,
)
from ..structures.modules import modules_of
from ..system.locks import Lock
from ..system.log import get_logger
from ..system.memory import SHORTAGES
from .engine import Engine, engine_of
from .options import ServiceDemand
from .self_test import run_self_test
from .tiers import PER_TOKEN, Service, Tier, has_padding
from .tree_attention import layer_masks, single_mask

logger = get_logger(__name__)

# Other inputs that a prompt brings, of which steps know what becomes of them.
_OF_PROMPTS = frozenset(("cache_position", "inputs_embeds", "logits_to_keep"))

# Verdicts that are kept of one model; hooks and settings that come and go have each their own.
_MOST_KEPT = 16

# Verdicts in a row of which none was found again: what changes with every call is not tested
# before every call.
_MOST_NEW = 8


_OTHER_RANK = "another process that computes this model cannot verify drafts as this one can"


class _Trial(NamedTuple):
    """A test of how a call's model is served, over so many rows; whether they may be packed."""

    engine: Engine
    model: Any
    model_kwargs: dict[str, Any]
    rows: int
    packs: bool
    demand: ServiceDemand

    def run(self, ranks: Ranks, moving: Moving) -> tuple[Service, bool]:
        """The verdict, and whether it holds for later calls too."""
        model, shortage = self.model, False
        if not ranks.lowest((why := _why_plain(model, self.demand.trusts)) is None):
            return Service(Tier.PLAIN, why or _OTHER_RANK), True
        logger.warning_once(
            f"{type(model).__name__}: the first call with an assistant tests how drafts are "
            f"verified, {self.engine.first_call}; later ones start at once"
        )
        self.engine.prepare(model)
        try:
            service = self._first_passing(moving)
        except SHORTAGES as error:
            shortage = True
            why = f"no memory to test how drafts are verified ({error!r}); free some of it"
            service = Service(Tier.PLAIN, why)
        worth = -[*Tier].index(service.tier)
        if ranks.lowest(worth) != worth:
            return Service(Tier.PLAIN, _OTHER_RANK), False
        logger.info("%s: %s (%s)", type(model).__name__, service.tier.value, service.reason)
        return service, not shortage

    def _first_passing(self, moving: Moving) -> Service:
        model, reason = self.model, ""
        foreign = self.demand.trusts and has_callers_code(model)
        for service in _candidates(self.engine, model, self.packs, self.demand):
            width = self.demand.width
            inputs = self.model_kwargs, self.rows, width
            found = run_self_test(model, service, *inputs, moving, foreign)
            if isinstance(found, Service) and found.tier is Tier.PLAIN:
                return found
            if isinstance(found, Service):
                return replace(found, reason=reason or found.reason, foreign=foreign)
            reason = f"{service.tier.value} failed its test: {found}"
            if service.attention_by != "mask":
                logger.warning_once(
                    f"{type(model).__name__}: the kernels of {service.attention_by} do not serve "
                    f"its attention, which goes on slower ({found})"
                )
        return Service(Tier.PLAIN, reason)


class _Verdicts:
    """What was found out about a model, by all that it depends on, the newest last."""

    def __init__(self) -> None:
        self._lock = Lock()  # held while the model is tested
        # Attributes that its forwards change, by which no verdict is told.
        self._moving: Moving = {}
        self._found: list[tuple[Any, int, Service]] = []
        self._new = 0
        self._refused: Any = None
        # What the attributes were before the newest verdict's test, and that one.
        self._tested: tuple[Any, Any] | None = None

    def get_or_test(self, trial: _Trial, ranks: Ranks) -> Service:
        """A verdict that was found before, or by a test, which all ranks make or none."""
        with self._lock:
            key, width = self._key(trial), trial.demand.width
            known = self._get(key, width)
            if ranks.lowest(known is not None) and known is not None:
                return known
            why = "its hooks or settings are others in every call; keep them"
            if not (ranks.several or self._is_worth_a_test(key)):
                return Service(Tier.PLAIN, why)
            before = attributes_of(trial.model)
            service, holds = trial.run(ranks, self._moving)
            if holds:
                # The test may have shown more attributes that move.
                verdict = self._key(trial), width, service
                self._found = [*self._found, verdict][-_MOST_KEPT:]
                self._tested = before, verdict
                self._new += 1
            return service

    def _key(self, trial: _Trial) -> Any:
        """All that a verdict depends on beside the width."""
        demand = trial.demand
        wanted = trial.rows, trial.packs, demand.static_buffers, demand.trusts
        return structure_of(trial.model, self._moving), trial.model.dtype, id(trial.engine), wanted

    def _get(self, key: Any, width: int) -> Service | None:
        for verdict in reversed(self._found):
            if verdict[1] >= width and verdict[0] == key:
                self._renew(verdict, verdict)
                self._new = 0
                return verdict[2]
        return None

    def _is_worth_a_test(self, key: Any) -> bool:
        """Whether a new verdict will be found again, as far as that is known: some are now and
        then, or this one was asked for in the call before too."""
        again, self._refused = key == self._refused, key
        return again or self._new < _MOST_NEW

    def learn_moves(self, model: Any) -> None:
        """A call ends within which nobody may have changed the model: what is another attribute
        than before its test moves by itself, and the verdict is found without it."""
        with self._lock:
            tested, self._tested = self._tested, None
            if tested is not None and note_moves(self._moving, tested[0], model):
                key, width, service = tested[1]
                self._renew(
                    tested[1], ((structure_of(model, self._moving), *key[1:]), width, service)
                )

    def _renew(self, verdict: Any, new: Any) -> None:
        """Let a verdict be the newest one, in another form."""
        self._found = [*(one for one in self._found if one is not verdict), new]


_services: weakref.WeakKeyDictionary[Any, _Verdicts] = weakref.WeakKeyDictionary()
_lock = Lock()


def choose_service(
    model: Any,
    model_kwargs: dict[str, Any],
    batch_size: int = 1,
    demand: ServiceDemand | None = None,
) -> Service:
    """The best tier the model is right at.

    Found once per model as it is, its hooks, adapters and settings included, and once more for
    batches and padding, and for wider forwards. Where memory is too short to find
    it, the call is decoded plainly and the next one asks again.

    Args:
        model: a transformers model.
        model_kwargs: inputs of its forward, as `generate` prepared them.
        batch_size: rows, of which no mask tells where nothing is padded.
        demand: what the call wants of forwards.
    """
    ranks = Ranks.of(model)
    if is_pipeline(model) and has_padding(model_kwargs):
        return Service(Tier.PLAIN, "later stages of a pipeline see no padding; pass one row")
    with _lock:
        verdicts = _services.setdefault(model, _Verdicts())
    several = has_padding(model_kwargs) or (batch_size > 1 and not is_pipeline(model))
    rows = 2 if several else 1
    if batch_size > rows > 1 and hooks_of(*modules_of(model)):
        # They may know of each row, as PEFT's with an adapter for each do.
        rows = batch_size
    engine = _engine_of(model)
    packs = batch_size > 1 and engine.packs and _packs(model, model_kwargs)
    trial = _Trial(engine, model, model_kwargs, rows, packs, demand or ServiceDemand())
    return verdicts.get_or_test(trial, ranks)


def _engine_of(model: Any) -> Engine:
    try:
        return engine_of(input_device(model))
    except Exception:  # whatever a model raises that cannot say; it is decoded plainly
        return engine_of(torch.device("cpu"))


def learn_moves(model: Any) -> None:
    """See what a call that ends has changed of the model."""
    if (verdicts := _services.get(model)) is not None:
        verdicts.learn_moves(model)


def _why_plain(model: Any, trusts: bool) -> str | None:
    """What no test need be asked about; None: nothing.

    Args:
        trusts: see :class:`~.options.ServiceDemand`.
    """
    why = why_plain() or why_other_loop(model, trusts) or why_code_is_unknown(model, trusts)
    if (why := why or _why_plain_in_training(model)) is not None:
        return why
    if any(getattr(module, "max_norm", None) is not None for module in modules_of(model)):
        return "its embeddings have a max_norm: forwards change rows that later forwards read"
    if (why := why_plain_in_pipeline(model)) is not None:
        return why
    if cache_name(model) is None:
        return "its forward takes no cache"
    return None if takes_dynamic_cache(model) else "it does not take a DynamicCache"


def _why_plain_in_training(model: Any) -> str | None:
    """What of a model with parts in train mode no other way of decoding would repeat; None: nothing
    that its settings tell of.

    Dropout takes random numbers in every forward, so fewer forwards take others.
    """
    training = [module for module in modules_of(model) if module.training]
    if not training:
        return None
    settings = [item for part in training for item in vars(part).items()]
    settings += [("drop", part.p) for part in training if isinstance(part, _DropoutNd)]
    if model.training:
        settings += vars(model.config.get_text_config(decoder=True)).items()
    noises = ("drop", "jitter", "noise")
    if any(x for name, x in settings if type(x) is float and any(part in name for part in noises)):
        whose = "the model is" if model.training else "parts of the model are"
        return f"{whose} in train mode and drops out; call model.eval()"
    if model.training and checkpoints_activations(model):
        return "gradient checkpointing keeps no cache; call model.eval()"
    return None


def _candidates(engine: Engine, model: Any, packs: bool, demand: ServiceDemand) -> list[Service]:
    """Tiers that the model's properties allow, best first."""
    config = model.config.get_text_config(decoder=True)
    name = cache_name(model) or CACHE
    chain = Service(Tier.CHAIN, "", cache_name=name)
    stateful, layers = is_stateful(model), DynamicCache(config=config).layers
    if stateful or any(type(layer) not in SLOT_LAYERS for layer in layers):
        replay = Service(Tier.REPLAY, "it has a recurrent state", cache_name=name)
        if stateful:
            return [replay]
        return [replace(chain, reason="it has a convolution state"), replay]
    if (why := _why_no_tree(model, config)) is not None:
        return [replace(chain, reason=why)]
    slides = all(getattr(layer, "sliding_window", None) for layer in layers)
    tree = Service(Tier.TREE, "one mask", single_mask(config), cache_name=name, slides=slides)
    trees = [tree]
    if rules := layer_masks(config):
        trees.insert(0, replace(tree, reason="a mask per layer type", rules=rules))
    trees = engine.candidates(model, trees, demand, packs)
    if (why := why_no_mask(model.config)) is not None:
        trees, chain = [x for x in trees if x.attention_by != "mask"], replace(chain, reason=why)
    return [*trees, chain]


def _packs(model: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the rows of a batch may be fed behind one another: nothing comes with the rows whose
    meaning is not known, and every layer is here."""
    foreign = any(
        isinstance(value, torch.Tensor)
        for name, value in model_kwargs.items()
        if name not in PER_TOKEN | _OF_PROMPTS
    )
    known = is_exchangeable(attention_of(model.config))
    return known and not foreign and not is_pipeline(model)


def _why_no_tree(model: Any, config: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not takes_positions(model):
        return "its forward takes no position_ids"
    if getattr(config, "alibi", False):
        return "alibi counts distances in cache slots"
    return None
