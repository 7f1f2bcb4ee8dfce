"""The causal language models of the installed transformers, and how each is served.

`python -m tests.support.architectures` writes docs/architectures.md.
"""

import json
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_retrieval_assist.verification.service import Tier, choose_service

from .tiny_models import tiny_config, tiny_model

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


def build(name):
    """A tiny model of a class."""
    model_class = getattr(transformers, name)
    return tiny_model(model_class, tiny_config(model_class.config_class))


def table_row(name, model):
    """The table's line on a class: how a tiny model of it is served, alone and in batches."""
    single, batch = (
        choose_service(model, {"attention_mask": torch.ones(rows, 8, dtype=torch.long)}, rows)
        for rows in (1, 2)
    )
    why = BELOW_KNOWN.get(name, "" if single.tier is Tier.TREE else single.reason)
    if batch.tier is not single.tier:
        why = f"{why}; in batches {batch.reason}".lstrip("; ")
    return f"| {name} | {single.tier.value} | {batch.tier.value} | {why} |"


def table():
    lines = [
        "# How each architecture is served",
        "",
        "This page lists the model classes and the tier that the self-test chose for each. It is "
        "for those who ask whether their model is assisted. "
        "`python -m tests.support.architectures` writes "
        f"it, with tiny float32 models of transformers {transformers.__version__}.",
        "",
        "Batches are padded ones. On the replay tier their rows stay in step: a recurrent state "
        "can be kept after a whole forward or restored to what it was before, for all rows at the "
        "same token, so every row accepts as many tokens as the one that accepts fewest.",
        "",
        "| class | one row | batch | why not higher |",
        "|---|---|---|---|",
    ]
    lines += [table_row(name, build(name)) for name in architectures()]
    lines += ["", "Not served, and not tested:", ""]
    lines += [f"* {name}: {why}" for name, why in SKIPPED.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
