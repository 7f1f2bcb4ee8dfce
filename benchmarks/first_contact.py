"""What a card makes of all that was built without one, in two tables to paste.

A randomly initialised model says recorded text (:mod:`benchmarks.forced`), in calls of one length
and then of growing ones, by plain decoding and with an assistant: whether the tokens are plain's,
what was recorded or why not, what computed attention, seconds, and the memory that is held after.
Runs on a CPU too, where nothing stays in place and nothing is recorded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_retrieval_assist import SuffixAssistant
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

CALLS = {
    "prompt": "prompt",
    "plain": "plain s",
    "seconds": "assisted s",
    "forwards": "forwards",
    "repeated": "recorded",
    "recordings": "recordings made",
    "same": "plain's tokens",
    "plain_held": "plain MiB held",
    "held": "assisted MiB held",
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
    config, new_tokens = SHAPES[arguments.shape], arguments.new_tokens or (12 if quick else 128)
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
    assistant = SuffixAssistant(budget=15, reroute=False)
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
            same=f"{float((found.ids == expected.ids).float().mean()):.0%}",
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
