"""The test that a tier must pass on a model before it serves it.

Random tokens are decoded by the tier's own verifier, drafts being accepted, rejected in part and
absent, beside plain decoding of the same tokens: equal logits, or the tier is not right there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from ..decoding.row_text import RowText
from ..token_tree import TokenTree
from .fixed_verifier import ForwardOptions
from .host import input_device, kwargs_after, uncompiled
from .kv_cache import SlotCache
from .tiers import Service, Tier, cache_for


def _tolerance(dtype: torch.dtype) -> float:
    """Largest error, relative to the logits' spread, that rounding explains."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.2


# The fed tree: two paths of two nodes below the root. When the second is accepted, keeping it moves
# slots. The chain tiers get three nodes in a row, the last of them wrong.
_TREE_PARENTS = [-1, 0, -1, 2]

# Tokens that rows generate in the three steps of the test. Rows of a batch differ, so that their
# progress does.
_PROGRESS = ((3, 3, 1), (1, 2, 1))

# What happens to a test for reasons of the moment, and says nothing of the model.
SHORTAGES = (MemoryError, torch.OutOfMemoryError)


def fault(
    model: Any, service: Service, model_kwargs: dict[str, Any], several: bool = False
) -> str | None:
    """What goes wrong when the tier verifies drafts on random tokens; None when nothing does.

    The reference is what plain decoding does: one token per forward from a cache of its own.
    `several`: calls have several rows, or padding.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no memory for the test.
    """
    try:
        with _evaluating(model), uncompiled(model):
            error = _largest_error(model, service, model_kwargs, several)
    except SHORTAGES:
        raise
    except Exception as exception:  # whatever an unsuitable model raises, the next tier serves it
        return f"{type(exception).__name__}: {exception}".splitlines()[0][:200]
    limit = _tolerance(model.dtype)
    return None if error <= limit else f"logits off by {error:.2g} of their spread"


@torch.no_grad()
def _largest_error(
    model: Any, service: Service, model_kwargs: dict[str, Any], several: bool
) -> float:
    """Over three steps: a draft that is rejected in part, one that is accepted, and none."""
    probe = _Probe(model, service, model_kwargs, several)
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

    def __init__(self, model: Any, service: Service, model_kwargs: dict[str, Any], several: bool):
        self.model, self.service = model, service
        self.config = model.config.get_text_config(decoder=True)
        self.extra: dict[str, Any] = {}
        rows = 1
        if model.config.is_encoder_decoder:
            names = ("encoder_outputs", "attention_mask")
            self.extra = {n: model_kwargs[n] for n in names if model_kwargs.get(n) is not None}
            rows = len(self.extra["encoder_outputs"][0])
        elif several:
            rows = 2
        generator = torch.Generator().manual_seed(0)
        length = _prompt_length(self.config)
        ids = torch.randint(1, self.config.vocab_size, (rows, length + 10), generator=generator)
        self.prompt = ids[:, :length].to(input_device(model))
        # Per row the text, and behind it a token that is drafted wrongly.
        self.texts: list[list[int]] = ids[:, length:].tolist()
        self.mask = torch.ones_like(self.prompt)
        if rows == 2 and not self.extra:
            self.mask[1, :3] = 0
        self.rows = [RowText(i, self.prompt[i], 16) for i in range(rows)]
        for row, text in zip(self.rows, self.texts, strict=True):
            row.generated.append(text[0])
        cache = SlotCache(self.config)
        kwargs, _ = self._feed_prompt(cache)
        cache.begin(rows)
        self.verifier = service.verifier(model, cache, kwargs, self.prompt, ForwardOptions())

    def _feed_prompt(self, cache: DynamicCache) -> tuple[dict[str, Any], Any]:
        """The keyword arguments of the steps to come, and the outputs for the prompt."""
        kwargs = self.extra | {
            self.service.cache_name: cache_for(self.model, cache),
            "use_cache": True,
        }
        if not self.model.config.is_encoder_decoder:
            kwargs["attention_mask"] = self.mask
            if "position_ids" in forward_parameters(self.model):
                kwargs["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)
        inputs = self.model.prepare_inputs_for_generation(
            self.prompt, is_first_iteration=True, **kwargs
        )
        return kwargs, self.model(**inputs, return_dict=True)

    def reference(self) -> torch.Tensor:
        """Logits [rows, tokens, vocab_size] of plain decoding, the texts being fed."""
        model, ids = self.model, self.prompt
        kwargs, outputs = self._feed_prompt(DynamicCache(config=self.config))
        logits = []
        for tokens in list(zip(*self.texts, strict=True))[: sum(_PROGRESS[0])]:
            kwargs = kwargs_after(model, outputs, kwargs)
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
        verified = self.verifier.forward(self.rows, [tree for tree, _ in plans])
        for row, (_, accepted) in zip(self.rows, plans, strict=True):
            text, done = self.texts[row.index], len(row.generated)
            row.generated += text[done : done + len(accepted)]
        self.verifier.keep(self.rows, verified, [accepted for _, accepted in plans])
        return [
            verified.of_row(row.index, len(tree))[accepted].float()
            for row, (tree, accepted) in zip(self.rows, plans, strict=True)
        ]

    def _plan(self, row: RowText, number: int) -> tuple[TokenTree, list[int]]:
        """A row's draft in a step, and the fed tokens of it that will be accepted."""
        text = self.texts[row.index]
        in_step = self.service.tier is Tier.REPLAY
        tokens = _PROGRESS[0 if in_step else row.index % 2][number]
        # Up to here the draft is right; then it goes wrong.
        known = text[len(row.generated) :][: tokens - 1]
        right = known + [text[-1]] * (2 - len(known))
        if number == 2:
            return TokenTree.empty(), [0]
        if number == 1:
            # Rows of a batch feed unequally much, unless they go in step.
            right = right if in_step or row.index % 2 == 0 else right[:1]
            return TokenTree.chain(right, [1.0] * len(right)), list(range(tokens))
        if self.service.tier is not Tier.TREE:
            return TokenTree.chain([*right, text[-1]], [1.0] * 3), list(range(tokens))
        tree = TokenTree.build([text[-1], text[-2], *right], _TREE_PARENTS, [1.0] * 4)
        return tree, [0, 3, 4][:tokens]


def _prompt_length(config: Any) -> int:
    """Longer than any local window that the masks do not know of, where that is affordable."""
    windows = [
        value
        for name, value in config.to_dict().items()
        if "window" in name and name != "sliding_window" and isinstance(value, int)
    ]
    return max([8, *(w + 2 for w in windows if w <= 1024)])


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Scope in which the model is in evaluation mode, so that nothing draws random numbers."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Of the class's forward: an instance's may be wrapped by hooks that take anything."""
    return inspect.signature(type(model).forward).parameters


def has_padding(model_kwargs: dict[str, Any]) -> bool:
    """Whether a mask hides something."""
    mask = model_kwargs.get("attention_mask")
    return mask is not None and not bool(mask.all())
