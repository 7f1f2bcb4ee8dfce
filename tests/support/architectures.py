"""The causal language models of the installed transformers, and how each is served.

`python -m tests.support.architectures` writes docs/architectures.md.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_retrieval_assist.verification.service import Tier, choose_service

from .lossless import build

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
KNOWN = Path(__file__).parents[1] / "fixtures" / "architectures.json"

SKIPPED = {
    "BltForCausalLM": "plain `generate` fails on its default configuration",
    "Gemma3nForConditionalGeneration": "its vision tower needs timm",
    "Gemma4AssistantForCausalLM": "drafts for another model, cannot generate alone",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another model, cannot generate alone",
    "MusicgenForCausalLM": "has a `generate` of its own, for several codebooks at once",
    "MusicgenMelodyForCausalLM": "has a `generate` of its own, for several codebooks at once",
}

BELOW_KNOWN = dict.fromkeys(
    ("NemotronHForCausalLM", "Zamba2ForCausalLM"),
    "transformers clamps their time steps at `time_step_limit` in forwards of several tokens "
    "but not of one: logits 0.7 and 2 % of their spread off (1e-6 and 6e-6 without the clamp)",
)
"""Why a class is served at a lower tier than the one at which its mathematics could be served."""


@cache
def architectures():
    """Every distinct class behind `AutoModelForCausalLM`, except those skipped."""
    names = set()
    for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names |= {entry} if isinstance(entry, str) else {*entry}
    return sorted(names - SKIPPED.keys())


def known_tiers():
    """The tier at which each class was found right by experiments outside this package."""
    return json.loads(KNOWN.read_text())


def row_of(model):
    """How a tiny model is served: tier of one row, of a batch, and why not higher."""
    name = type(model).__name__
    single, batch = (
        choose_service(model, {"attention_mask": torch.ones(rows, 8, dtype=torch.long)}, rows)
        for rows in (1, 2)
    )
    why = BELOW_KNOWN.get(name, "" if single.tier is Tier.TREE else single.reason)
    if batch.tier is Tier.REPLAY:  # its rows would only go back together
        batch = replace(batch, tier=Tier.PLAIN, reason="states only go back together")
    if batch.tier is not single.tier:
        why = f"{why}; in batches {batch.reason}".lstrip("; ")
    return single.tier.value, batch.tier.value, why.strip()


def table():
    served = {}
    for name in architectures():
        served.setdefault(row_of(build(name)), []).append(name)
    lines = [
        "# How each architecture is served",
        "",
        "The tier that the self-test chose for each model class, for one row and for a padded "
        "batch. `python -m tests.support.architectures` writes this page, with tiny float32 "
        f"models of transformers {transformers.__version__}.",
        "",
        "On the replay tier recurrent states are restored and fed again; those of several rows "
        "would only go back together, so batches are decoded plainly.",
        "",
        "| one row | batch | why not higher | classes |",
        "|---|---|---|---|",
    ]
    order = [tier.value for tier in Tier]
    rows = sorted(served, key=lambda row: (order.index(row[0]), order.index(row[1]), row[2]))
    lines += [f"| {' | '.join(row)} | {', '.join(served[row])} |" for row in rows]
    lines += ["", "Not served, and not tested:", ""]
    lines += [f"* {name}: {why}" for name, why in SKIPPED.items()]
    return "\n".join(lines) + "\n"


def tabled():
    """What the page says of each class: a row as `row_of` gives it."""
    lines = TABLE.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if " | " in line]
    return {
        name: tuple(cell.strip() for cell in row)
        for *row, names in rows[1:]
        for name in names.split(", ")
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
