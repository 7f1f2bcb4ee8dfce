"""Whether a device's tokens are plain's where nothing forces them.

Small random models of some architectures choose their tokens, by plain decoding and by an assistant
that knows the text. Each text is judged again by one forward over all of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3Config

from hf_retrieval_assist import SamAssistant

from .replay import build
from .report import Report

# Their logits lie so close together that half precision rounds some tokens to others, in plain
# decoding as well.
_MODELS = (LlamaConfig, Qwen3Config, Gemma3TextConfig, MixtralConfig)
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
_SETTLING = 4  # calls, of which the second compares what the first has recorded

TEXTS = {
    "model": "model",
    "dtype": "dtype",
    "decoding": "decoding",
    "same": "plain's tokens",
    "accepted": "drafts accepted",
    "repeated": "recorded",
    "gap": "gap",
    "plain_gap": "plain's gap",
}


def judge(report: Report, arguments: argparse.Namespace, progress: Callable[[str], None]) -> None:
    """Texts of models that choose their tokens, by plain decoding and with drafts of that text."""
    table = report.table("Texts that nothing forces", TEXTS)
    report.note(
        "gap: how far the worst token is from the likeliest, by one forward over the whole text, "
        "relative to the spread of its logits"
    )
    prompt, new = (24, 16) if arguments.quick else (300, 96)
    how = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    for kind in _MODELS[: 1 if arguments.quick else None]:
        for dtype in dict.fromkeys(("float32", arguments.dtype)):
            progress(f"{kind.model_type} in {dtype}")
            config = kind(**_SIZES)
            model = build(config, argparse.Namespace(**(vars(arguments) | {"dtype": dtype})))
            half = torch.randint(3, config.vocab_size, (1, prompt // 2))
            ids = half.repeat(1, 2).to(model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for sampled in (False, True):
                torch.manual_seed(arguments.seed)
                plain = model.generate(**inputs, **how, do_sample=sampled)
                for _ in range(_SETTLING):
                    # No kernel for CPUs takes part, as none does on a card.
                    assistant = SamAssistant([plain[0].tolist()], budget=15, reroute=False)
                    torch.manual_seed(arguments.seed)
                    found = model.generate(**inputs, **how, do_sample=sampled, assistant=assistant)
                last = assistant.stats.last
                gaps = {"gap": gap(model, found, prompt), "plain_gap": gap(model, plain, prompt)}
                table.add(
                    model=kind.model_type,
                    dtype=dtype,
                    decoding="sampled" if sampled else "greedy",
                    same=f"{float((found == plain)[0, prompt:].float().mean()):.0%}",
                    accepted=last.accepted,
                    repeated=f"{last.repeated} of {last.forwards}",
                    **({} if sampled else gaps),
                )


@torch.no_grad()
def gap(model: Any, text: torch.Tensor, start: int) -> float:
    """How far the worst of the tokens from `start` on is from the likeliest."""
    logits = model(text, use_cache=False).logits[0, start - 1 : -1].float()
    chosen = logits.gather(1, text[0, start:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std()).max())
