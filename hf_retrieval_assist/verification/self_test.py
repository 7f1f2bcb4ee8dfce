"""The test that a tier must pass on a model before it serves it.

Random tokens are decoded by the tier's own verifier, drafts being accepted, rejected in part and
absent, beside plain decoding of the same tokens: equal logits, or the tier is not right there.
Then it is fed as widely as calls will feed it, since a forward may depend on how many tokens it
gets (capacities of experts, adapters and hooks that count from the end): at most half as many are
tried until the logits are those of narrow forwards. How far a forward may reach is found beside.

Logits in float32 have to follow their inputs smoothly. Layers that round what they multiply, to
eight bits or to half precision, turn the last bits of an activation into whole steps, and several
tokens at once have other last bits than each alone: now and then that passes as equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..cache.kv_cache import SlotCache
from ..host.model_key import Moving, attributes_of, autocast_dtypes, note_moves, torch_setting
from ..host.positions import named_lengths
from ..host.transformers_private import input_device, kwargs_after, takes_positions
from ..system.memory import SHORTAGES
from ..system.tensors import same_bits
from ..types.row_text import RowText
from ..types.token_tree import Forest, TokenTree
from .engine import engine_of
from .options import CallOptions
from .reach import find_reach
from .tiers import Service, Tier, cache_for
from .traces import REMEMBERS, Traces
from .verifier import ForwardScope

# The fed tree: two paths of two nodes below the root. When the second is accepted, keeping it moves
# slots. The chain tiers get three nodes in a row, the last of them wrong.
_TREE_PARENTS = [-1, 0, -1, 2]

# Tokens that rows generate in the three steps of the test. Rows of a batch differ, so that their
# progress does.
_PROGRESS = ((3, 3, 1), (1, 2, 1))

# Tokens per row that forwards of the three steps feed: what is right there may be wrong beyond.
_NARROW = 4


# Other texts between two times the same one: eleven forwards with that one's, so that what acts in
# every nth forward, up to the tenth, acts elsewhere in the text.
_BETWEEN = 3

# How far accelerators, on which additions meet in any order, may be off in the same text, relative
# to the logits' spread.
_UNORDERED = 1e-5

# Settings by which PyTorch itself rounds activations.
_COARSE = ("high", "medium")

# Texts that are tried until one is finite: a model may hold rows for tokens that nobody writes.
_TEXTS = 3

# Texts whose logits have to leave the straight line, as many of them as this share: a router that
# takes other experts at some place does so for all tokens behind it.
_BENT_TEXTS, _BENT = 4, 0.3

# How much of the whole way. No tenth part of the logits of transformers' classes with random
# weights did so for another reason than a router's; where one layer of three rounded its rows to
# eight bits or to bfloat16, more than half of them. One layer's rows cross a step; what rounding
# to float32 leaves of logits that hardly move is no bend.
_BEND, _ROUNDING = 0.15, 2.0**-15
_MOVE = 2.0**-5
_LEAST_MOVE = 2.0**-14

_STEPS = (
    "its logits move in steps (its layers round activations, to eight bits say), so that last bits "
    "of float32 decide tokens"
)


def run_self_test(
    model: Any,
    service: Service,
    model_kwargs: dict[str, Any],
    rows: int,
    width: int,
    moving: Moving,
    foreign: bool,
) -> Service | str:
    """The service with what forwards may feed, or what goes wrong when it verifies drafts; plain
    where that would go wrong by any tier.

    The reference is what plain decoding does: one token per forward from a cache of its own.

    Args:
        rows: of the test; where there are several, one of them is padded.
        width: tokens per row that calls may feed in a forward.
        moving: gets the places of attributes that forwards change.
        foreign: whether code that no known library has written runs in the model.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no memory for the test.
    """
    try:
        with _restored(model, moving, foreign) as traces, _noting_dtypes(model) as dtypes:
            for seed in range(_TEXTS):
                probe = _Probe(model, service, model_kwargs, rows, seed)
                expected = probe.reference()
                if not expected.isnan().any():
                    break
            traces.look()
            for other in range(seed + 1, seed + 1 + _BETWEEN):
                between = _Probe(model, service, model_kwargs, rows, other)
                between.feed_prompt(DynamicCache(config=between.config))
            remembers = not _agree(expected, probe.reference())
            traces.look()
            why = traces.why_plain or (REMEMBERS if remembers else None)
            exact = min(dtype.itemsize for dtype in dtypes) >= 4
            precise = torch_setting("get_float32_matmul_precision") not in _COARSE
            if why is None and exact and precise:
                seeds = range(seed + 1, seed + _BENT_TEXTS)
                others = (_Probe(model, service, model_kwargs, rows, n) for n in seeds)
                why = _STEPS if _move_in_steps(itertools.chain([probe], others)) else None
            if why is not None:
                return Service(Tier.PLAIN, why)
            error = probe.begin().narrow_error(expected)
            # The largest error, relative to the logits' spread, that rounding explains.
            limit = 1e-3 if exact else 0.2
            if not (error <= limit or exact):
                # The model's own forwards show where rounding is coarser. They would be as far off
                # if they depended on how many tokens they get, so not everything is believed.
                limit = max(limit, 2 * min(limit, probe.rounding(expected)))
            if not error <= limit:
                return f"logits off by {error:.2g} of their spread"
            while width > _NARROW and not probe.wide_error(width) <= limit:
                width //= 2
                probe = _Probe(model, service, model_kwargs, rows, seed).begin()
            reach = find_reach(model, service.cache_name)
    except SHORTAGES:
        raise
    except Exception as exception:  # whatever an unsuitable model raises, the next tier serves it
        return f"{type(exception).__name__}: {exception}".splitlines()[0][:200]
    return replace(service, width=max(width, _NARROW), reach=reach)


@contextmanager
def _restored(model: Any, moving: Moving, foreign: bool) -> Iterator[Traces]:
    """Scope of the test's forwards, of which nothing stays; what they changed is noted."""
    traces, before = Traces(model, foreign), attributes_of(model)
    with torch.no_grad(), traces.restored():
        yield traces
        note_moves(moving, before, model)


@contextmanager
def _noting_dtypes(model: Any) -> Iterator[set[torch.dtype]]:
    """Scope that notes in what forwards compute: the model's dtype, and that of autocast, which a
    wrapper of its forward may enter."""
    noted = {model.dtype}
    part = next((m for m in model.modules() if isinstance(m, nn.Linear)), model)
    with part.register_forward_pre_hook(lambda *_: noted.update(autocast_dtypes())):
        yield noted


def _error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest one relative to the spread; NaN, which compares as no error, is one."""
    errors = (actual - expected).abs().nan_to_num(nan=torch.inf)
    return float(errors.max() / expected.std())


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether logits of the same text are the same, as far as a device computes alike twice."""
    return same_bits(one, other) or (not one.is_cpu and _error(one, other) <= _UNORDERED)


def _move_in_steps(probes: Iterable[_Probe]) -> bool:
    """Whether a model's logits do, as far as the texts of these tell."""
    bent = 0.0
    for count, probe in enumerate(probes, start=1):
        bent += probe.bent()
        if bent < _BENT * count:
            return False
    return True


class _Probe:
    """Rows of random tokens decoded by a tier's verifier, beside plain decoding of the same.

    Where there are several rows, one of them is padded.
    """

    def __init__(
        self, model: Any, service: Service, model_kwargs: dict[str, Any], rows: int, seed: int
    ):
        self.model, self.service = model, service
        self.config = model.config.get_text_config(decoder=True)
        self.extra: dict[str, Any] = {}
        if model.config.is_encoder_decoder:
            names = ("encoder_outputs", "attention_mask")
            self.extra = {n: model_kwargs[n] for n in names if model_kwargs.get(n) is not None}
            rows = len(self.extra["encoder_outputs"][0])
        generator = torch.Generator("cpu").manual_seed(seed)
        length = _prompt_length(self.config)
        shape = rows, length + 10
        ids = torch.randint(1, self.config.vocab_size, shape, generator=generator, device="cpu")
        self.prompt = ids[:, :length].to(input_device(model))
        # Each row's text, and behind it a token that is drafted wrongly.
        self.texts: list[list[int]] = ids[:, length:].tolist()
        self.mask = torch.ones_like(self.prompt)
        if rows > 1 and not self.extra:
            self.mask[1, :3] = 0
        self.rows = [RowText(i, self.prompt[i], 16) for i in range(rows)]
        for row, text in zip(self.rows, self.texts, strict=True):
            row.generated.append(text[0])

    def begin(self) -> _Probe:
        """The same, once the prompt is fed to the tier's verifier."""
        model, service, rows = self.model, self.service, len(self.rows)
        cache = SlotCache(self.config, forgets=service.forgets(rows))
        kwargs, _ = self.feed_prompt(cache)
        cache.begin(rows)
        given = model, cache, kwargs, self.prompt, service, CallOptions(), ForwardScope()
        self.verifier = engine_of(input_device(model)).verifier(*given)
        self.verifier.prepare()
        return self

    def narrow_error(self, expected: torch.Tensor) -> float:
        """That of three steps: a draft rejected in part, one that is accepted, and none."""
        actual = []
        for number in range(3):
            plans = [self._plan(row, number) for row in self.rows]
            texts = [
                self.texts[row.index][len(row.generated) :][: len(accepted)]
                for row, (_, accepted) in zip(self.rows, plans, strict=True)
            ]
            found = zip(self._forward(plans, texts), plans, strict=True)
            actual.append([logits[accepted] for logits, (_, accepted) in found])
        rows = [torch.cat(logits) for logits in zip(*actual, strict=True)]
        return max(_error(expected[row, : len(logits)], logits) for row, logits in enumerate(rows))

    def wide_error(self, width: int) -> float:
        """That of a forward over as many tokens in every row, against narrow ones.

        Trees are as many children of the root; chains go as deep as there are positions.
        """
        tree = self.service.tier is Tier.TREE
        if not tree:
            lengths = named_lengths(self.config)
            width = min([width, *(n - len(self.rows[0]) for n in lengths)])
        tokens = [row.last for row in self.rows]
        # Rows of a batch feed unequally much.
        counts = [max(1, width - 1 - row.index) for row in self.rows]
        shape = (lambda n: [-1] * n) if tree else (lambda n: [*range(-1, n - 1)])
        plans = [
            (TokenTree.build([token] * n, shape(n), [1.0] * n), [0])
            for token, n in zip(tokens, counts, strict=True)
        ]
        nothing: list[list[int]] = [[]] * len(tokens)
        pairs = self._forward([(TokenTree.chain([t], [1.0]), []) for t in tokens], nothing)
        wide = self._forward(plans, [[token] for token in tokens])
        both, parts = zip(pairs, wide, strict=True), (slice(1), slice(1, None))[: 1 + tree]
        errors = [_error(few[part], many[part]) for few, many in both for part in parts]
        for done in range(1, 1 if tree else width, _NARROW):
            chains = [TokenTree.chain([t] * (_NARROW - 1), [1.0] * (_NARROW - 1)) for t in tokens]
            plans = [(chain, [*range(_NARROW)]) for chain in chains]
            narrow = self._forward(plans, [[token] * _NARROW for token in tokens])
            for few, many in zip(narrow, wide, strict=True):
                part = many[done : done + _NARROW]
                errors += [_error(few[: len(part)], part)] if len(part) else []
        return max(errors)

    def rounding(self, expected: torch.Tensor) -> float:
        """How far the logits of plain decoding are from those of one forward over the same text."""
        whole, tokens = copy(self), expected.shape[1]
        fed = self.prompt.new_tensor(self.texts)[:, :tokens]
        whole.prompt = torch.cat([self.prompt, fed], dim=1)
        whole.mask = torch.cat([self.mask, torch.ones_like(fed)], dim=1)
        _, outputs = whole.feed_prompt(DynamicCache(config=self.config))
        return _error(expected, outputs.logits[:, -tokens:].float())

    def feed_prompt(self, cache: DynamicCache) -> tuple[dict[str, Any], Any]:
        """The keyword arguments of the steps to come, and the outputs for the prompt."""
        kwargs = self.extra | {
            self.service.cache_name: cache_for(self.model, cache),
            "use_cache": True,
        }
        if not self.model.config.is_encoder_decoder:
            kwargs["attention_mask"] = self.mask
            if takes_positions(self.model):
                kwargs["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)
        inputs = self.model.prepare_inputs_for_generation(
            self.prompt, is_first_iteration=True, **kwargs
        )
        return kwargs, self.model(**inputs, return_dict=True)

    def reference(self) -> torch.Tensor:
        """Logits [rows, tokens, vocab_size] of plain decoding, the texts being fed."""
        model, ids, logits = self.model, self.prompt, []
        kwargs, outputs = self.feed_prompt(DynamicCache(config=self.config))
        for tokens in list(zip(*self.texts, strict=True))[: sum(_PROGRESS[0])]:
            kwargs = kwargs_after(model, outputs, kwargs)
            ids = torch.cat([ids, ids.new_tensor(tokens)[:, None]], dim=1)
            inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
            outputs = model(**inputs, return_dict=True)
            logits.append(outputs.logits[:, -1].float())
        return torch.stack(logits, dim=1)

    def bent(self) -> float:
        """The share of the prompt's logits that leave the straight line when its embeddings move a
        little along one."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.Embedding)]
        met, logits = set(), []
        for share in (0.0, 0.5, 1.0):

            def moved(layer: nn.Module, _: Any, out: Any, share: float = share) -> Any:
                if not isinstance(out, torch.Tensor):
                    return out
                met.add(layer)
                way = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
                length = max(_MOVE / out.shape[-1], _LEAST_MOVE)
                return out + way * (share * length * out.std())

            with ExitStack() as hooks:
                for layer in layers:
                    hooks.enter_context(layer.register_forward_hook(moved))
                _, outputs = self.feed_prompt(DynamicCache(config=self.config))
            logits.append(outputs.logits.double())
        begin, middle, end = logits
        off_it = (begin - 2 * middle + end).norm(dim=-1)
        whole = (end - begin).norm(dim=-1) + _ROUNDING * begin.norm(dim=-1)
        return float((off_it >= _BEND * whole).double().mean()) if met else 0.0

    def _forward(
        self, plans: list[tuple[TokenTree, list[int]]], texts: list[list[int]]
    ) -> list[torch.Tensor]:
        """Verify a tree of each row and keep the fed tokens that are accepted of it.

        Args:
            plans: the rows' trees, and what is accepted of each.
            texts: the tokens by which rows grow.

        Returns:
            For each row, logits [1 + nodes, vocab_size].
        """
        trees = Forest.of([tree for tree, _ in plans])
        verified = self.verifier.forward(self.rows, trees)
        logits = [
            verified.of_row(row.index, len(tree)).to(torch.float32, copy=True)
            for row, (tree, _) in zip(self.rows, plans, strict=True)
        ]
        for row, text in zip(self.rows, texts, strict=True):
            row.generated += text
        self.verifier.keep(self.rows, verified, [accepted for _, accepted in plans])
        return logits

    def _plan(self, row: RowText, number: int) -> tuple[TokenTree, list[int]]:
        """A row's draft in a step, and the fed tokens of it that will be accepted."""
        text = self.texts[row.index]
        lockstep = self.service.tier is Tier.REPLAY
        tokens = _PROGRESS[0 if lockstep else row.index % 2][number]
        # The draft is right up to here; then it goes wrong.
        known = text[len(row.generated) :][: tokens - 1]
        right = known + [text[-1]] * (2 - len(known))
        if number == 2:
            return TokenTree.empty(), [0]
        if number == 1:
            # Rows of a batch feed unequally much, unless they go in step.
            right = right if lockstep or row.index % 2 == 0 else right[:1]
            return TokenTree.chain(right, [1.0] * len(right)), list(range(tokens))
        if self.service.tier is not Tier.TREE:
            return TokenTree.chain([*right, text[-1]], [1.0] * 3), list(range(tokens))
        tree = TokenTree.build([text[-1], text[-2], *right], _TREE_PARENTS, [1.0] * 4)
        return tree, [0, 3, 4][:tokens]


def _prompt_length(config: Any) -> int:
    """Longer than any local window that the masks do not know of, where that is affordable."""
    windows = [
        value
        for name, value in vars(config).items()
        if "window" in name and name != "sliding_window" and isinstance(value, int)
    ]
    return max([8, *(w + 2 for w in windows if w <= 1024)])
