"""Tokens per forward of fallbacks at equal nodes: chains, trees, retrieval, and all together.

Counts alone, with assistants that have seen nothing before a prompt. An MTP head for the demo model
is trained by `hf-retrieval-assist train-head --kind mtp`; without one, its lines are left out.

With `--fallback-dice`, instead: how often drafters with a distribution name the next token of
greedy and of sampled text, and what chains of their first choices bring, when they know the random
numbers that the tokens will be drawn with ("dice") and when they do not.

With `--fallback-peers`, instead: two published drafters without training (:mod:`benchmarks.peers`)
beside retrieval, on prompts that nothing was tuned on and on the demo's tasks.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_retrieval_assist import Assistant, MtpHead, SamAssistant
from hf_retrieval_assist.demo.comparison import TASKS
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.draft_models.mtp import MtpDrafter
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.kernels.quantized_model import quantized_model
from hf_retrieval_assist.kernels.reroute import reroute, standing_in

from . import peers
from .methods import Method, assisted
from .model import PROMPTS, Prompt, first_of_each, read_prompts
from .report import Report
from .spec_bench import COLUMNS, measure

_LEVELS = 8  # of a tree

_TEMPERATURES = (0.7, 1.0, 1.5)
# By the options of `generate`, and by the warpers that these are.
_FILTERS: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "none": ({"top_k": 0}, []),
    "top-k 50": ({"top_k": 50}, [TopKLogitsWarper(50)]),
    "top-p 0.9": ({"top_k": 0, "top_p": 0.9}, [TopPLogitsWarper(0.9)]),
}
# Of the copy that drafts as a draft model.
_BITS, _GROUP = 4, 32


def methods(nodes: int, head: MtpHead | None) -> list[Method]:
    """What is compared; drafts of all but plain decoding have `nodes` nodes."""
    compared = [
        Method("plain", dict),
        assisted("retrieval alone", partial(SamAssistant, fallback=None, budget=nodes)),
        assisted("Token Recycling", lambda: Assistant([TokenRecyclingDrafter()], budget=nodes)),
        assisted("retrieval and Token Recycling", partial(SamAssistant, budget=nodes)),
    ]
    if head is None:
        return compared
    sizes = {"total": nodes + 1, "min_prob": 0.0, "head": head}
    chain = partial(MtpDrafter, top_k=1, depth=nodes - 1, **sizes)
    tree = partial(MtpDrafter, depth=_LEVELS - 1, **sizes)
    return [
        *compared,
        assisted("MTP head, chain", lambda: Assistant([chain()], budget=nodes)),
        assisted("MTP head, tree", lambda: Assistant([tree()], budget=nodes)),
        assisted(
            "all together",
            lambda: SamAssistant(fallback=["token_recycling", tree()], budget=nodes),
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mtp-head", type=Path, help="folder of one trained for the demo model")
    parser.add_argument("--fallback-prompts", type=int, default=1, help="of each category")
    parser.add_argument("--fallback-nodes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--fallback-tokens", type=int, default=48, help="to generate per prompt")
    parser.add_argument("--fallback-dice", action="store_true", help="sampled text, dice or none")
    parser.add_argument("--fallback-peers", action="store_true", help="RACER and AdaPLD")
    parser.add_argument("--fallback-levels", type=int, nargs="+", default=[3, 5], help="of drafts")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the model")
    model, tokenizer = load_demo_model()
    folder = arguments.mtp_head
    head = None if folder is None else MtpHead.from_pretrained(folder, model)
    count, tokens = arguments.fallback_prompts, arguments.fallback_tokens
    if arguments.fallback_dice:
        return _with_dice(model, tokenizer, arguments, progress)
    sizes = arguments.fallback_nodes
    if arguments.quick:
        count, tokens, sizes = 1, 12, [8]
    if arguments.fallback_peers:
        return _beside_peers(model, tokenizer, count, tokens, sizes, progress)
    settings = {"new_tokens": tokens, "mtp_head": "none" if head is None else "trained"}
    report = Report("fallbacks", settings)
    chosen = first_of_each(read_prompts(), count) + _tasks(count)
    for nodes in sizes:
        table = report.table(f"{nodes} nodes", COLUMNS)
        measure(table, model, tokenizer, chosen, methods(nodes, head), tokens, progress)
    return report


def _tasks(count: int) -> list[Prompt]:
    """The first prompts of the demo, which ask for copying."""
    return [Prompt("the demo's tasks", task.file, task.prompt) for task in TASKS[:count]]


def _beside_peers(
    model: Any,
    tokenizer: Any,
    count: int,
    tokens: int,
    sizes: Sequence[int],
    progress: Callable[[str], None],
) -> Report:
    report = Report("fallbacks", {"new_tokens": tokens})
    table = report.table("Peers", COLUMNS | {"nodes": "nodes"})
    prompts = first_of_each(read_prompts(PROMPTS / "untuned"), count) + _tasks(count)
    for nodes in sizes:
        known, compared = len(table.rows), peers.methods(nodes, model)
        measure(table, model, tokenizer, prompts, compared, tokens, progress)
        for row in table.rows[known:]:
            row["nodes"] = nodes
    return report


def _with_dice(
    model: Any, tokenizer: Any, arguments: argparse.Namespace, progress: Callable[[str], None]
) -> Report:
    """The prompts are the rows of one call, each of which has its own random numbers."""
    count, tokens = arguments.fallback_prompts, arguments.fallback_tokens
    levels, decodings = arguments.fallback_levels, _decodings()
    if arguments.quick:
        count, tokens, levels, decodings = 1, 12, [2], decodings[:2]
    prompts = first_of_each(read_prompts(), count)
    report = Report("fallbacks", {"new_tokens": tokens, "seed": arguments.seed})
    coarse, weights = coarse_copy(model), quantized_model(model)
    readers = {
        "The model itself in 8 bits": Reader(model, lambda: standing_in(weights)),
        f"A copy in {_BITS} bits as draft model": Reader(coarse),
    }
    tables = {title: report.table(title, dice_columns(levels)) for title in readers}
    for what, options, warpers in decodings:
        progress(f"plain decoding: {what}")
        texts = sample(model, tokenizer, prompts, tokens, arguments.seed, options)
        for title, reader in readers.items():
            progress(f"{title}: {what}")
            found = [reader.logits(text) for text in texts]
            arms = {"blind": _first_choices(found, warpers)}
            if options["do_sample"]:
                arms["known"] = _first_choices(found, warpers, arguments.seed)
            for row in _rows(texts, arms, levels):
                tables[title].add(**what, **row)
    return report


def dice_columns(levels: Sequence[int]) -> dict[str, str]:
    columns = {"temperature": "temperature", "filter": "filter", "category": "category"}
    columns |= {"blind": "first right", "known": "with dice"}
    for n in levels:
        columns |= {f"blind_{n}": f"tokens/forward, chain of {n}", f"known_{n}": "with dice"}
    return columns


def _decodings() -> list[tuple[dict[str, Any], dict[str, Any], LogitsProcessorList]]:
    """Each by its name, by the options of `generate`, and by the warpers that these are."""
    found: list[tuple[dict[str, Any], dict[str, Any], LogitsProcessorList]] = [
        ({"temperature": 0.0, "filter": "none"}, {"do_sample": False}, LogitsProcessorList())
    ]
    for name, (options, warpers) in _FILTERS.items():
        for temperature in _TEMPERATURES:
            sampling = {"do_sample": True, "temperature": temperature, **options}
            chain = LogitsProcessorList([TemperatureLogitsWarper(temperature), *warpers])
            found.append(({"temperature": temperature, "filter": name}, sampling, chain))
    return found


def coarse_copy(model: Any) -> Any:
    """The model, its linear layers rounded to few bits with a scale for so many weights."""
    twin = copy.deepcopy(model)
    for layer in twin.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(_rounded(layer.weight.detach()), requires_grad=False)
    return twin


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """float [out, in], of which `in` is a multiple of the group or smaller."""
    largest = 2 ** (_BITS - 1) - 1
    groups = weight.unflatten(1, (-1, min(_GROUP, weight.shape[1])))
    scales = groups.abs().amax(-1, keepdim=True) / largest
    return (torch.round(groups / scales).nan_to_num() * scales).flatten(1)


@dataclass(frozen=True)
class _Text:
    """One row of a call.

    Attributes:
        prompt: int64 [length], without padding.
        new: int64 [n], up to the end of the text.
    """

    category: str
    prompt: torch.Tensor
    new: torch.Tensor


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    new_tokens: int,
    seed: int,
    options: dict[str, Any],
) -> list[_Text]:
    """What plain decoding writes for prompts that are the rows of one call."""
    texts = [prompt.text for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(seed)
    with reroute():
        ids = model.generate(**inputs, **options, max_new_tokens=new_tokens)
    end = model.generation_config.eos_token_id
    ends = torch.tensor([] if end is None else end).flatten()
    length = inputs["input_ids"].shape[1]
    found = []
    for prompt, row, mask in zip(prompts, ids, inputs["attention_mask"], strict=True):
        new = row[length:]
        ended = torch.isin(new, ends).nonzero().flatten().tolist()
        new = new[: ended[0] + 1] if ended else new
        found.append(_Text(prompt.category, row[:length][mask.bool()], new))
    return found


class Reader:
    """A drafter that is shown a text that is known already.

    A chain of a drafter's first choices is accepted as far as each is the text's token, and until
    then the drafter has read the text alone. So one forward over the text tells what every chain
    would have brought.

    Args:
        model: that drafts.
        scope: that it drafts in; the prompt is read outside of it.
    """

    def __init__(
        self, model: Any, scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._model, self._scope = model, scope
        self._caches: dict[bytes, DynamicCache] = {}

    @torch.no_grad()
    def logits(self, text: _Text) -> torch.Tensor:
        """float [n, vocab_size], that the drafter would choose each new token from."""
        fed = torch.cat([text.prompt[-1:], text.new[:-1]])[None]
        cache = copy.deepcopy(self._cache(text.prompt))
        with self._scope():
            logits: torch.Tensor = self._model(fed, **{CACHE: cache}).logits[0]
        return logits

    def _cache(self, prompt: torch.Tensor) -> DynamicCache:
        """Of the prompt without its last token."""
        key = prompt.numpy().tobytes()
        if key not in self._caches:
            cache = DynamicCache(config=self._model.config)
            self._model(prompt[None, :-1], **{CACHE: cache}, logits_to_keep=1)
            self._caches[key] = cache
        return self._caches[key]


def _first_choices(
    logits: Sequence[torch.Tensor], warpers: LogitsProcessorList, seed: int | None = None
) -> list[list[int]]:
    """Of each text, what its drafter names first at every place.

    Args:
        logits: float [n, vocab_size] of each text, all of them rows of one call.
        seed: of the random numbers that the tokens were drawn with; None: not known to the drafter.
    """
    dice = None if seed is None else torch.Generator().manual_seed(seed)
    chosen: list[list[int]] = [[] for _ in logits]
    for place in range(max(map(len, logits))):
        for row, known in enumerate(logits):
            # Rows that have ended are drawn for as well.
            noise = (
                None if dice is None else torch.empty(known.shape[1]).exponential_(generator=dice)
            )
            if place < len(known):
                none = torch.empty((1, 0), dtype=torch.long)
                law = warpers(none, known[place, None].float()).softmax(-1)[0]
                chosen[row].append(int((law if noise is None else law / noise).argmax()))
    return chosen


def _rows(
    texts: Sequence[_Text], arms: dict[str, list[list[int]]], levels: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One of each category and one over all."""
    for category in [*dict.fromkeys(text.category for text in texts), "all"]:
        row: dict[str, Any] = {"category": category}
        for arm, choices in arms.items():
            right = [
                [guess == token for guess, token in zip(chosen, text.new.tolist(), strict=True)]
                for chosen, text in zip(choices, texts, strict=True)
                if category in (text.category, "all")
            ]
            # The first token comes with the prompt.
            hits = [hit for text in right for hit in text[1:]]
            row[arm] = mean(hits) if hits else None
            for n in levels:
                forwards = sum(chain_forwards(text, n) for text in right)
                row[f"{arm}_{n}"] = sum(map(len, right)) / forwards
        yield row


def chain_forwards(right: Sequence[bool], levels: int) -> int:
    """Forwards that write a text, the prompt's among them, with chains of so many levels.

    Args:
        right: at each place, whether the first choice was the text's token.
    """
    written = forwards = 1
    while written < len(right):
        draft = right[written : written + levels]
        written += 1 + (draft.index(False) if False in draft else len(draft))
        forwards += 1
    return forwards
