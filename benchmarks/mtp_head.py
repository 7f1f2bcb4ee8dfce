"""An MTP layer for the demo model, from nothing: training, and what trees bring over chains.

    python -m benchmarks.mtp_head TRACES WORK

TRACES holds recorded requests (chat.npz, code.npz, ...: `prompt_tokens`, `prompt_offsets` and the
same of `output`). One layer of transformers' own `MtpModel` learns to go on from Gemma-3-270M's
hidden states on all but the last requests of each file, whose prompts it then serves. What is
counted are tokens per step at equal numbers of nodes. WORK keeps the layer; a second run only
compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hf_retrieval_assist import Assistant, EarlyExit, SamAssistant
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.drafters.automaton import AutomatonDrafter
from hf_retrieval_assist.drafters.mtp import MtpDrafter
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.target.feature_taps import FeatureTap
from hf_retrieval_assist.target.mtp_layers import MtpLayers

from .eagle_head import serve
from .report import Report

COLUMNS = {
    "drafter": "drafter",
    "accepted": "tokens/step",
    "nodes": "nodes/step",
    "steps": "steps",
    "identical": "identical",
}
# Ids that the training tells apart: the most frequent ones.
_IDS = 8192
# Steps that the layer takes on its own output in training.
_UNROLLED = 3


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    model, _ = load_demo_model()
    known, held_out = requests(args.traces, args.held_out, args.length)
    layers = MtpLayers(trained(model, known, args))
    table = {name: value for name, value in vars(args).items() if name not in ("work", "traces")}
    report = Report("mtp-head", table | {"learnt": sum(map(len, known))})
    compare(report, model, layers, held_out, args)
    print(report)
    print(f"Written to {report.save(args.work)}.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--held-out", type=int, default=2, help="prompts of each file to serve")
    parser.add_argument("--length", type=int, default=192, help="tokens kept of a text")
    parser.add_argument("--tokens", type=int, default=24_000, help="to learn from")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=8, help="verified per step")
    parser.add_argument("--layer", type=int, default=16, help="at which EarlyExit leaves")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def requests(folder: Path, held_out: int, length: int) -> tuple[list[Tensor], list[list[int]]]:
    """Texts to learn from, the files in turn, and prompts to serve."""
    texts, prompts = [], []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as recorded:
            parts = [split(recorded, kind) for kind in ("prompt", "output")]
        prompts += [prompt[-length:].tolist() for prompt in parts[0][-held_out:]]
        whole = map(np.concatenate, zip(*parts, strict=True))
        texts.append([text[:length].astype(np.int64) for text in whole][:-held_out])
    turns = [text for turn in zip(*texts, strict=False) for text in turn]
    return [torch.from_numpy(text) for text in turns if len(text) > 2 * _UNROLLED], prompts


def split(recorded: Any, kind: str) -> list[np.ndarray]:
    return np.split(recorded[f"{kind}_tokens"], recorded[f"{kind}_offsets"][1:-1])


def trained(model: Any, texts: Sequence[Tensor], args: argparse.Namespace) -> MtpModel:
    """The layer, learnt once and kept."""
    module, path = untrained(model), args.work / "mtp.safetensors"
    if path.is_file():
        module.layers.load_state_dict(load_file(path))
        return module
    fit(module, list(features(model, texts, args.tokens)), args)
    args.work.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in module.layers.state_dict().items()}, path)
    return module


def untrained(model: Any) -> MtpModel:
    """transformers' module for one layer, which begins as the model's last layer."""
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    module = MtpModel(model, 1)
    layer = module.layers[0]
    layer.mtp_block.load_state_dict(model.get_decoder().layers[-1].state_dict())
    width = model.config.hidden_size
    with torch.no_grad():
        layer.eh_proj.weight[:, :width] = 0.01 * torch.eye(width)
        layer.eh_proj.weight[:, width:] = torch.eye(width)
    return module


def features(model: Any, texts: Sequence[Tensor], tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each text and the model's hidden states [length, hidden_size] of it."""
    bar = tqdm(total=tokens, desc="hidden states")
    for text in texts:
        with torch.no_grad(), FeatureTap(model, (-1,)) as tap:
            model(text[None], logits_to_keep=1)
        yield text, tap.features[0]
        bar.update(len(text))
        if bar.n >= tokens:
            return


def fit(module: MtpModel, examples: list[tuple[Tensor, Tensor]], args: argparse.Namespace) -> None:
    """Cross-entropy of the next tokens over the most frequent ids, unrolled."""
    counts = torch.bincount(torch.cat([text for text, _ in examples]), minlength=_IDS)
    ids = counts.topk(_IDS).indices
    place = torch.full((len(counts),), -100).scatter(0, ids, torch.arange(_IDS))
    output = module.shared_head.weight.detach()[ids]
    optimizer = torch.optim.AdamW(module.layers.parameters(), lr=args.learning_rate)
    steps = args.epochs * len(examples)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, steps)
    bar = tqdm(total=steps, desc="training")
    for _ in range(args.epochs):
        for i in torch.randperm(len(examples)).tolist():
            loss = loss_of(module, *examples[i], output, place)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.layers.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=float(loss))
            bar.update()


def loss_of(module: MtpModel, text: Tensor, hidden: Tensor, output: Tensor, place: Tensor) -> Any:
    """Of one text: the layer on the model's hidden states, then on its own."""
    hidden, loss = hidden[None, :-1], torch.tensor(0.0)
    for first in range(1, 1 + _UNROLLED):
        tokens = text[None, first:]
        positions = torch.arange(first, len(text))[None]
        cache = MtpCache(config=module.config)
        hidden = module.forward_layer(0, hidden, positions, cache, input_ids=tokens)[:, :-1]
        logits = hidden[0] @ output.T
        loss = loss + F.cross_entropy(logits, place[text[first + 1 :]], ignore_index=-100)
    return loss / _UNROLLED


def compare(
    report: Report,
    model: Any,
    layers: MtpLayers,
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> None:
    """Serve the prompts with each drafter, so many nodes to a step."""
    chain = {"top_k": 1, "depth": args.nodes - 1, "min_prob": 0.0, "layers": layers}
    tree = {"depth": 4, "min_prob": 0.0, "layers": layers}
    drafters = {
        "first layers, chain": [EarlyExit(args.layer, width=1, max_levels=args.nodes)],
        "first layers, tree": [EarlyExit(args.layer)],
        "MTP layer, chain": [MtpDrafter(**chain)],
        "MTP layer, tree": [MtpDrafter(**tree)],
        "Token Recycling": [TokenRecyclingDrafter()],
        "retrieval": [AutomatonDrafter(args.nodes)],
    }
    assistants = {
        name: Assistant(made, budget=args.nodes, costs=None) for name, made in drafters.items()
    }
    both = [MtpDrafter(**tree), "token_recycling"]
    assistants["all together"] = SamAssistant(fallback=both, budget=args.nodes)
    expected = serve(model, prompts, None, args.new_tokens)
    table = report.table(f"{args.nodes} nodes, {len(prompts)} unseen prompts", COLUMNS)
    for name, assistant in assistants.items():
        found, total = serve(model, prompts, assistant, args.new_tokens), assistant.stats.total
        table.add(
            drafter=name,
            accepted=total.mean_accepted_tokens,
            nodes=total.nodes_per_step,
            steps=total.steps,
            identical="yes" if found == expected else "NO",
        )
        print(table.rows[-1])


if __name__ == "__main__":
    main()
