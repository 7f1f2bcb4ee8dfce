"""Train two tiny heads for SmolLM2-135M, and count what they draft on prompts that are new to them.

    python -m benchmarks.heads FOLDER [--minutes M] [--texts N] [--output OUT]

The model writes greedy texts, from which an EAGLE-3 head of one layer and a block head of one layer
and eight slots learn what the model holds likely. The folder keeps the texts and both heads, in the
layouts that `speculators` gives heads; what is there is not made again. Then the model's texts for
other prompts are replayed: its hidden states are known, so only the heads are run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from hf_retrieval_assist import Assistant, EagleHead, SamAssistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.feedback import RowFeedback
from hf_retrieval_assist.extensions.heads.block_head import BlockHead
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter
from hf_retrieval_assist.extensions.heads.fallbacks import FolderDrafter
from hf_retrieval_assist.extensions.heads.published import read_published
from hf_retrieval_assist.policy.policy import Ask, DraftingPolicy, Outcome
from hf_retrieval_assist.tools.demo_model import load_demo_model, prompt_inputs
from hf_retrieval_assist.types.token_tree import Limits
from hf_retrieval_assist.verification.verified import TopLogits

from .report import Report

HEADS, NODES = ("eagle3", "dflash"), 16
NEW, IDS, SLOTS, UNROLLED, MASK, RATE = 96, 4096, 8, 3, 4, 1e-3
LAYERS = (2, 15, 27)  # boundaries of 30 blocks, which feed both heads

THINGS = "bread,bicycles,the moon,winter,dogs,money,exams,tea,the sea,volcanoes,friendship,trains"
THINGS += ",sleep,a garden,the heart,music,rain,chess,history,electricity,birds,cities,a market"
ASKED = ("Explain {} to a child.", "Give me five facts about {}.", "Write a short story about {}.")
ASKED += ("Write a letter about {}.", "What are the advantages and disadvantages of {}?")
TASKS = "adds two numbers,counts the vowels of a string,sorts a list,finds the largest number"
TASKS += (
    ",reads a file line by line,checks whether a number is prime,removes duplicates from a list"
)
TASKS += ",converts Celsius to Fahrenheit,merges two dictionaries,computes a factorial"
LANGUAGES = ("Write a Python function that {}.", "Write a JavaScript function that {} and call it.")
TABLES = "books,students,products,flights,patients,songs,cars,invoices,teachers,hotels"
QUERIES = ("Write an SQL query that selects all {} and sorts them by name.",)
QUERIES += (
    "Create an SQL table of {} and insert three rows.",
    "Write an SQL query that counts {}.",
)
EDITS = ("Correct the mistakes in this text:\n\n{}", "Copy this text and add a title:\n\n{}")

REPORT = """The committee met on Tuesday evening in the old school. It approved the plans for a new
footbridge over the canal, which will cost 240,000 euros and will be opened in May. The bridge will
be four metres wide, so that cyclists and walkers can use it together."""
SHOP = """class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)"""
SCHEMA = "CREATE TABLE orders (id INT, customer_id INT, total DECIMAL, created DATE);"
PROMPTS = {
    "chat": [
        "How can I become a better listener?",
        "Tell me about the first people who climbed Mount Everest.",
        "My neighbour plays loud drums at night. What should I say to her?",
        "What is the difference between a virus and a bacterium?",
    ],
    "code": [
        "Write a Python class for a stack with push, pop and peek.",
        "Write a Python function that reverses a linked list.",
        "Write a C program that prints the first twenty Fibonacci numbers.",
        "Write a Python program that prints the ten most frequent words of a text file.",
    ],
    "edit": [
        f"Copy this text, but write Friday instead of Tuesday:\n\n{REPORT}",
        f"Write this text in the past tense:\n\n{REPORT}",
        f"Rename the class to Cart in this code:\n\n{SHOP}",
        f"Add a method that removes an item to this code:\n\n{SHOP}",
    ],
    "SQL": [
        f"{SCHEMA}\nWrite a query for the total of all orders of each customer.",
        f"{SCHEMA}\nWrite a query for the orders of 2023, the largest first.",
        "Write an SQL query for the names and salaries of employees who earn more than 50000.",
        "Write SQL statements that create a table of rivers and a table of bridges over them.",
    ],
}
"""Prompts that no head has learnt from."""


class Text(NamedTuple):
    """A prompt and what the model went on with.

    Attributes:
        ids: int64 [n].
        prompt: how many of them.
        features: [n, widths], that heads are fed.
        last: [n, width], that the output layer is fed.
    """

    ids: Tensor
    prompt: int
    features: Tensor
    last: Tensor


def asked() -> list[str]:
    """What the model is asked to write, but for edits of it, in an order without kinds."""
    kinds = ((THINGS, ASKED), (TASKS, LANGUAGES), (TABLES, QUERIES))
    pairs = [pair for things, asks in kinds for pair in itertools.product(asks, things.split(","))]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[i][0].format(pairs[i][1]) for i in order]


@torch.no_grad()
def write(
    model: Any, tokenizer: Any, prompts: Sequence[str], rows: int = 24
) -> Iterator[tuple[Tensor, int]]:
    """Each prompt and what the model goes on with, int64 [n], and the length of the prompt."""
    for first in tqdm(range(0, len(prompts), rows), "texts"):
        some = prompts[first : first + rows]
        ids = [prompt_inputs(tokenizer, one)["input_ids"][0] for one in some]
        widest = max(map(len, ids))
        padded = torch.stack([pad(row, (widest - len(row), 0)) for row in ids])
        real = torch.stack([torch.arange(widest) >= widest - len(row) for row in ids])
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        written = model.generate(padded, attention_mask=real.long(), **options)
        for row, prompt in zip(written, map(len, ids), strict=True):
            text = row[widest - prompt :]
            ends = (text[prompt:] == model.generation_config.eos_token_id).nonzero()
            yield text[: prompt + int(ends[0]) + 1] if len(ends) else text, prompt


def training_texts(model: Any, tokenizer: Any, count: int) -> list[tuple[Tensor, int]]:
    """Texts of the model, of which those that `asked` does not bring are edits of others."""
    plain = [*write(model, tokenizer, asked()[:count])]
    passages = [
        tokenizer.decode(text[-64:], skip_special_tokens=True)
        for text, _ in plain[: count - len(plain)]
    ]
    edits = [EDITS[i % len(EDITS)].format(one) for i, one in enumerate(passages)]
    return [*plain, *write(model, tokenizer, edits)]


@torch.no_grad()
def read(model: Any, written: Sequence[tuple[Tensor, int]]) -> list[Text]:
    """The texts with the model's hidden states."""
    texts = []
    for ids, prompt in tqdm(written, "states"):
        found = model.model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        texts.append(Text(ids, prompt, torch.cat([found[k][0] for k in LAYERS], 1), found[-1][0]))
    return texts


def begin(folder: Path, model: Any, ids: Tensor, is_block: bool) -> None:
    """Write a head that has learnt nothing."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, shared = config.num_attention_heads * size, config.num_key_value_heads * size
    fed, layer = width if is_block else 2 * width, "layers.0."
    shapes = {f"{layer}self_attn.q_proj": (heads, fed), f"{layer}self_attn.o_proj": (width, heads)}
    shapes |= {f"{layer}self_attn.{name}_proj": (shared, fed) for name in "kv"}
    shapes |= {f"{layer}mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj": (width, inner)}
    norms = ["norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm"]
    norms.append("hidden_norm" if is_block else f"{layer}hidden_norm")
    tensors = {n: torch.randn(s, generator=generator) * s[1] ** -0.5 / 2 for n, s in shapes.items()}
    tensors |= {name: torch.ones(width) for name in norms}
    if is_block:
        tensors |= {f"{layer}self_attn.{name}_norm": torch.ones(size) for name in "qk"}
    # Both begin with what the last of the layers says.
    tensors["fc"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], dim=1)
    tensors["lm_head"] = model.get_output_embeddings().weight.detach()[ids]
    named = {f"{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    marked = torch.zeros(config.vocab_size, dtype=torch.bool)
    marked[ids] = True
    named |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    settings = {"model_type": "qwen3" if is_block else "llama", "num_hidden_layers": 1}
    settings |= {"hidden_size": width, "intermediate_size": inner, "head_dim": size}
    settings |= {"num_attention_heads": config.num_attention_heads, "rope_theta": 1e4}
    settings |= {"num_key_value_heads": config.num_key_value_heads, "rms_norm_eps": 1e-5}
    kind = "dflash" if is_block else "eagle3"
    whole: dict[str, Any] = {"speculators_model_type": kind, "transformer_layer_config": settings}
    whole |= {"draft_vocab_size": len(ids)}
    if is_block:
        whole |= {"block_size": SLOTS, "mask_token_id": MASK, "sample_from_anchor": True}
    name = "aux_hidden_state_layer_ids"
    whole[name if is_block else f"eagle_{name}"] = [*LAYERS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    save_file(named, folder / "model.safetensors")


class Unrolled:
    """Keys and values of all steps of training so far, in place of a cache."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.steps.append((keys, values))
        steps = zip(*self.steps, strict=True)
        return tuple(torch.cat(part, dim=2) for part in steps)  # type: ignore[return-value]


def eagle_loss(head: Any, text: Tensor, features: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross entropy over steps that feed the head its own output, as EAGLE-3 is trained.

    Args:
        text: int64 [n].
        features: [n, widths].
        wanted: [n, ids], probabilities of the token behind each.
    """
    count = len(text) - 1
    place, cache, losses = torch.arange(count), Unrolled(), []
    hidden = head.fuse(features[None, :count])
    for step in range(UNROLLED):
        if step:
            hidden = pad(hidden, (0, 0, 1, 0))[:, :-1]
        before = place[:, None] - place
        # What was read in an earlier step is seen where no later one has read it.
        masks = [before == step - k if k else before >= step for k in range(step + 1)]
        masks[-1] = masks[-1] | (before == 0)
        hidden = head(0, text[None, 1:], hidden, place[None] + 1, torch.cat(masks, 1), cache)
        said = head.logits(hidden[0, step:]).log_softmax(-1)
        losses.append(-(wanted[1 + step :] * said).sum(-1).mean())
    return torch.stack(losses).mean()


def block_loss(
    head: Any, text: Tensor, features: Tensor, wanted: Tensor, embeddings: Tensor
) -> Tensor:
    """Cross entropy of blocks behind some of the tokens; earlier slots count more."""
    count = len(text) - SLOTS
    if count < 2:
        return features.new_zeros((), requires_grad=True)
    starts = 1 + torch.randperm(count - 1)[: min(20, count - 1)]
    ids = torch.full((len(starts), SLOTS), MASK)
    ids[:, 0] = text[starts]
    slots = torch.arange(SLOTS)
    places = (starts[:, None] + slots).flatten()
    known = torch.arange(len(text))
    block = torch.arange(len(starts)).repeat_interleave(SLOTS)
    sees = torch.cat([known < starts[block][:, None], block[:, None] == block], dim=1)
    mask = torch.zeros(sees.shape).masked_fill(~sees, -1e9)[None, None]
    states = head.body(
        noise_embeds=embeddings[ids.flatten()][None],
        context_hidden_states=features[None],
        position_ids=torch.cat([known, places])[None],
        attention_mask={"full_attention": mask},
    ).last_hidden_state[0]
    said = head.lm_head(states).log_softmax(-1)
    weights = (-slots / 4).exp().repeat(len(starts))
    losses = -(wanted[places] * said).sum(-1) * weights
    return losses.sum() / weights.sum()


def train(folder: Path, model: Any, texts: Sequence[Text], ids: Tensor, minutes: float) -> None:
    """Let a head learn for so long, and write it."""
    published = read_published(folder)
    is_block = published.kind == "dflash"
    head: Any = (BlockHead if is_block else EagleHead).of(published, model)
    weights = [weight for name, weight in head.named_parameters() if name != "lm_head.weight"]
    for weight in weights:
        weight.requires_grad_(True)
    output = model.get_output_embeddings().weight.detach()[ids]
    embeddings = model.get_input_embeddings().weight.detach()
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95))
    began, steps, mean = time.process_time(), 0, 0.0
    order: list[int] = []
    while (spent := (time.process_time() - began) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (steps + 1) / 20) * (1.02 - spent)
        for _ in range(4):
            order = order or torch.randperm(len(texts)).tolist()
            text = texts[order.pop()]
            given = head, text.ids, text.features, (text.last @ output.T).softmax(-1)
            loss = block_loss(*given, embeddings) if is_block else eagle_loss(*given)
            (loss / 4).backward()
            mean += 0.02 * (loss.item() - mean)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    print(f"{published.kind}: {steps} steps, loss {mean:.3f}")
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def replay(policy: DraftingPolicy, model: Any, texts: Sequence[Text]) -> float:
    """Tokens per step, over texts that the model has written itself."""
    came = steps = 0
    for text in texts:
        ids, first = text.ids.tolist(), text.prompt
        logits = text.last @ model.lm_head.weight.T
        session = policy.start(np.array(ids[:first], np.int32), Target.of(model))
        states = dict.fromkeys(policy.hidden_layers, text.features)
        shown = {layers: found[:first] for layers, found in states.items()}
        session.begin(ids[first : first + 1], logits[:first], shown)
        known = first + 1
        while known < len(ids):
            left = len(ids) - known - 1
            step = policy.draft(Ask([session], limits=lambda left=left: Limits([left])))
            new = len(step.trees[0].follow(ids[known:]))
            fed, chain = slice(known - 1, known + new), np.arange(new + 1, dtype=np.int32)
            feedback = RowFeedback(
                *(np.array(ids[fed], np.int32), chain, chain - 1),
                top=TopLogits(logits[fed]),
                states={layers: found[fed] for layers, found in states.items()},
            )
            tokens = ids[known : known + new + 1]
            policy.learn(step, [Outcome(session, tokens, step.trees[0], feedback)])
            known, came, steps = known + new + 1, came + new + 1, steps + 1
        session.close()
    return came / steps


def judge(folder: Path, model: Any, texts: Mapping[str, Sequence[Text]]) -> Report:
    """What the heads draft, alone and beside retrieval; each assistant reads all texts in turn."""
    eagle, block = (FolderDrafter(folder / name) for name in HEADS)
    chain = DFlashDrafter(BlockHead.of(read_published(folder / "dflash"), model), top_k=1)
    retrieval = ["logit_ngrams"]
    variants = {
        "block head, a chain": Assistant([chain], budget=SLOTS),
        "block head, a tree": Assistant([block], budget=SLOTS),
        "block head": Assistant([block], budget=NODES),
        "EAGLE-3": Assistant([eagle], budget=NODES),
        "retrieval": SamAssistant(fallback=retrieval, budget=NODES),
        "retrieval and block head": SamAssistant(fallback=[*retrieval, block], budget=NODES),
        "retrieval and EAGLE-3": SamAssistant(fallback=[*retrieval, eagle], budget=NODES),
    }
    columns = {"drafts": "drafts", "nodes": "nodes"} | {kind: kind for kind in texts}
    report = Report("heads", {"prompts": {kind: len(found) for kind, found in texts.items()}})
    table = report.table("Tokens per step by trained heads, prompts new to them", columns)
    for name, assistant in variants.items():
        policy = assistant.policy
        found = {kind: replay(policy, model, some) for kind, some in texts.items()}
        table.add(drafts=name, nodes=policy.planner.budget, **found)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6, help="of a CPU, for each head")
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_demo_model("smollm2", dtype=torch.float32)
    path = arguments.folder / "texts.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(training_texts(model, tokenizer, arguments.texts), path)
    written = torch.load(path)
    counts = torch.cat([ids for ids, _ in written]).bincount(minlength=model.config.vocab_size)
    # Ids that no text has in order of their number, which is that of their merges.
    ranks = counts - torch.arange(len(counts)) / len(counts)
    ids = ranks.topk(IDS).indices.sort().values
    wanted = [name for name in HEADS if not (arguments.folder / name).exists()]
    texts = read(model, written if wanted else [])
    for name in wanted:
        begin(arguments.folder / name, model, ids, name == "dflash")
        train(arguments.folder / name, model, texts, ids, arguments.minutes)
    new = {kind: read(model, [*write(model, tokenizer, some)]) for kind, some in PROMPTS.items()}
    report = judge(arguments.folder, model, new)
    print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
