"""The command `hf-retrieval-assist calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Command
from .values import at_least, device, dtype, load_model

if TYPE_CHECKING:
    from ..planning.cost_model import CostModel

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or hub id of the model")
    parser.add_argument("--dtype", type=dtype, default="auto", help="auto, float32, bfloat16, ...")
    parser.add_argument("--device", type=device, help="default: the first GPU, otherwise the CPU")
    parser.add_argument("--attention", help="implementation, such as sdpa or eager")
    parser.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="N", help="rows of a forward"
    )
    parser.add_argument(
        "--cache-length", type=at_least(1), default=1024, metavar="N", help="tokens before them"
    )
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=64, metavar="N", help="the largest n"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve as .png or .svg")


def _run(args: argparse.Namespace) -> None:
    """Measure, print the curve and keep it in the user's cache directory."""
    from ..cost_measurement import measure_cost
    from ..host.fingerprint import fingerprint
    from ..planning.cost_store import CostModels
    from ..record import plots

    axis = None if args.plot is None else plots.new_axis(5, 3)  # or say what it needs at once
    sizes = [size for size in _SIZES if size <= args.max_tokens]
    model = load_model(args.model, args.dtype, args.device, attn_implementation=args.attention)
    model.generation_config.eos_token_id = None  # it is to stop at no token
    model.generation_config.pad_token_id = 0
    costs = CostModels(CostModels.user_directory())
    cost = measure_cost(model, sizes, costs, args.batch_size, args.cache_length)
    costs.save(fingerprint(model))
    _print_curve(cost, sizes)
    print(f"Saved in {costs.directory}.")
    if axis is not None:
        drawn: Any = plots.plot_cost({args.model: cost}, axis, sizes[-1])
        drawn.figure.savefig(args.plot)


def _print_curve(cost: CostModel, sizes: list[int]) -> None:
    single = cost.seconds(1)
    print(f"{'n':>4} {'ms':>9} {'t(n)/t(1)':>10}")
    for size in sizes:
        seconds = cost.seconds(size)
        print(f"{size:>4} {seconds * 1e3:>9.3f} {seconds / single:>10.2f}")
    best = min(sizes, key=lambda size: cost.seconds(size) / size)
    print(f"Cheapest per token: n = {best}.")


COMMAND = Command(
    "measure what verifying drafts costs on this machine, and remember it", _add_arguments, _run
)
