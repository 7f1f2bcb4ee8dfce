"""What a card makes of all that was built without one, in three tables to paste.

A randomly initialised model says recorded text (:mod:`benchmarks.forced`), in calls of one length
and then of growing ones, by plain decoding and with an assistant: what was recorded or why not,
what computed attention, seconds, and the memory that is held after. Whether tokens are plain's is
seen where nothing forces them: by small random models of some architectures, whose texts an
assistant knows, each judged again by one forward over the whole text. Runs on a CPU too, where
nothing stays in place and nothing is recorded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3Config

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES

from .accelerator import Setting, prompts_of, software
from .forced import forcing
from .methods import Method, Run, run_method
from .replay import SHAPES, build, dense_ids, settle_model
from .report import PACKAGES, Report, version
from .traces import read_traces

# Prompts: of the first calls, of which the second compares what the first has recorded; and longer.
_SETTLING = 4
_LONGER = (2, 3, 4, 6, 8, 12)

# Random models whose texts are judged. Their logits lie so close together that half precision
# rounds some tokens to others, in plain decoding as well.
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
_NEW_TOKENS = 64  # as many as outputs of the shipped trace have

CALLS = {
    "prompt": "prompt",
    "plain": "plain s",
    "seconds": "assisted s",
    "forwards": "forwards",
    "repeated": "recorded",
    "recordings": "recordings made",
    "plain_held": "plain MiB held",
    "held": "assisted MiB held",
}
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
RECORDINGS = {"capacity": "capacity", "width": "width", "state": "is", "fault": "because"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, help="tokens of the shortest prompt (default: 256)")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    quick = arguments.quick
    arguments.shape = arguments.shape or ("tiny" if quick else "0.6b")
    settle_model(arguments)
    report = Report("first-contact", {n: getattr(arguments, n) for n in ("shape", "dtype", "seed")})
    report.settings |= software()
    report.note(", ".join(f"{name} {value}" for name, value in card(arguments.device).items()))
    config = SHAPES[arguments.shape]
    new_tokens = arguments.new_tokens or (12 if quick else _NEW_TOKENS)
    _judge(report, arguments, progress)
    progress(f"building the {arguments.shape} model")
    model = build(config, arguments)
    trace = dense_ids(read_traces(arguments.replay_traces)[0], config.vocab_size)
    shortest = arguments.prompt or (48 if quick else 256)
    settings = [
        prompts_of(trace, times * shortest, 1, new_tokens, 1, arguments.seed, model.device)
        for times in ([1] * _SETTLING + [*_LONGER[: 2 if quick else None]])
    ]
    # One tensor for all calls: what was recorded reads it where it is.
    texts = max((setting.texts for setting in settings), key=torch.Tensor.numel)
    with forcing(model, texts):
        _compare(report, model, texts, settings, progress)
    _tell_recordings(report, model)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        report.note(f"random numbers afterwards: {torch.rand(2, device=model.device).tolist()}")
    return report


def card(device: str) -> dict[str, Any]:
    """What decides how a device serves."""
    found = {name: version(name) for name in (*PACKAGES, "triton")} | {"on": device}
    if device.startswith("cuda"):
        found["card"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["hip"] = torch.version.hip
    return found


def _judge(report: Report, arguments: argparse.Namespace, progress: Callable[[str], None]) -> None:
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
                    assistant = SamAssistant([plain[0].tolist()], budget=15, reroute=False)
                    torch.manual_seed(arguments.seed)
                    found = model.generate(**inputs, **how, do_sample=sampled, assistant=assistant)
                last = assistant.stats.last
                gaps = {"gap": _gap(model, found, prompt), "plain_gap": _gap(model, plain, prompt)}
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
def _gap(model: Any, text: torch.Tensor, start: int) -> float:
    """How far the worst of the tokens from `start` on is from the likeliest."""
    logits = model(text, use_cache=False).logits[0, start - 1 : -1].float()
    chosen = logits.gather(1, text[0, start:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std()).max())


def _compare(
    report: Report,
    model: Any,
    texts: torch.Tensor,
    settings: Sequence[Setting],
    progress: Callable[[str], None],
) -> None:
    """All calls by plain decoding, then all of them with one assistant."""

    def call(setting: Setting, options: dict[str, Any]) -> tuple[Run, float | None]:
        """A call, and the MiB of the device that are held after it."""
        prompt, following = setting.prompts[0]
        progress(f"{'assisted' if options else 'plain'} behind {prompt.shape[1]} tokens")
        whole = torch.cat([prompt, following], dim=1)
        texts[:, : whole.shape[1]] = whole
        found = run_method(
            Method("", lambda: options),
            model,
            {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)},
            max_new_tokens=following.shape[1],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        on_card = model.device.type == "cuda"
        return found, torch.cuda.memory_allocated(model.device) / 2**20 if on_card else None

    # No kernel for CPUs takes part, as none does on a card.
    assistant = SamAssistant(memory=OutputMemory(), budget=15, reroute=False)
    table = report.table("Calls", CALLS)
    plain = [call(setting, {}) for setting in settings]
    for setting, (expected, plain_held) in zip(settings, plain, strict=True):
        found, held = call(setting, {"assistant": assistant})
        last = assistant.stats.last
        table.add(
            prompt=setting.context,
            plain=expected.seconds,
            seconds=found.seconds,
            forwards=last.forwards,
            repeated=last.repeated,
            recordings=last.recordings,
            plain_held=plain_held,
            held=held,
        )
    report.note(f"served as {last.tier}, attention by {last.attention}")


def _tell_recordings(report: Report, model: Any) -> None:
    table = report.table("Recordings", RECORDINGS)
    there = WORKSPACES.report(model)
    for workspace in there.idle:
        for step in workspace.kinds.values():
            state = "repeated" if step.trusted else "computed" if step.fault else "new"
            capacity, (width, *_) = workspace.shape.capacity, step.key
            table.add(capacity=capacity, width=width, state=state, fault=step.fault or "")
    for key, fault in there.faults.items():
        report.note(f"not recorded: {key}: {fault}")
