"""Tokens per forward of fallbacks at equal nodes: chains, trees, retrieval, and all together.

Counts alone, with assistants that have seen nothing before a prompt. An MTP head for the demo model
is trained by `hf-retrieval-assist train-head --kind mtp`; without one, its lines are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_retrieval_assist import Assistant, MtpHead, SamAssistant
from hf_retrieval_assist.demo.comparison import TASKS
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.draft_models.mtp import MtpDrafter
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter

from .methods import Method, assisted
from .model import Prompt, first_of_each, read_prompts
from .report import Report
from .spec_bench import COLUMNS, measure

_LEVELS = 8  # of a tree


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


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the model")
    model, tokenizer = load_demo_model()
    folder = arguments.mtp_head
    head = None if folder is None else MtpHead.from_pretrained(folder, model)
    count, tokens = arguments.fallback_prompts, arguments.fallback_tokens
    sizes = arguments.fallback_nodes
    if arguments.quick:
        count, tokens, sizes = 1, 12, [8]
    settings = {"new_tokens": tokens, "mtp_head": "none" if head is None else "trained"}
    report = Report("fallbacks", settings)
    prompts = first_of_each(read_prompts(), count)
    prompts += [Prompt("the demo's tasks", task.file, task.prompt) for task in TASKS[:count]]
    for nodes in sizes:
        table = report.table(f"{nodes} nodes", COLUMNS)
        measure(table, model, tokenizer, prompts, methods(nodes, head), tokens, progress)
    return report
