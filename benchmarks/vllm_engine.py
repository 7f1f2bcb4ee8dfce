"""The proposer inside vLLM, on the demo model: the same outputs, and what they took.

    python -m benchmarks.vllm_engine --model FOLDER [--tokens 40] [--parts FOLDER [--only MODE]]

Runs plain decoding, vLLM's own n-gram and suffix proposers, and ours, each in a process of its own,
over the 21 prompts of the other benchmarks: one by one, one by one again, and as one batch. Exits
with 1 where an output of ours is not that of plain decoding. `--parts` keeps what each process
found, and a mode that is there is not run again, so that each can be run by itself, when the
machine is quiet. Needs the environment that `make test-vllm` makes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from .report import Report

LONGEST_DRAFT = 12
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "ours": {"model": "hf_retrieval_assist.extensions.vllm.Proposer"},
}
ROUNDS = {"first": "one by one", "again": "one by one, again", "batch": "at once"}
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def prompts() -> list[str]:
    """Those of the benchmark on the demo model."""
    files = sorted((Path(__file__).parent / "prompts").glob("*.json"))
    kinds = [json.loads(file.read_text()) for file in files]
    return [prompt["text"] for kind in kinds for prompt in kind["prompts"]]


def measure(mode: str, model: str, tokens: int) -> dict[str, Any]:
    """Outputs, engine steps and seconds of each round."""
    llm = _engine(mode, model)
    steps = _counted_steps(llm.llm_engine)
    calls = _timed_calls() if mode == "ours" else []
    _texts(llm, ["Hello"], 4)
    rounds = {}
    for name in ROUNDS:
        batches = [prompts()] if name == "batch" else [[prompt] for prompt in prompts()]
        steps.clear()
        calls.clear()
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = [text for batch in batches for text in _texts(llm, batch, tokens)]
        rounds[name] = {
            "outputs": outputs,
            "steps": len(steps),
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
            "calls": list(calls),
        }
    return {"versions": _versions(), "rounds": rounds}


def _engine(mode: str, model: str) -> Any:
    from vllm import LLM

    speculation = SPECULATION[mode]
    if speculation is not None:
        speculation = speculation | {"num_speculative_tokens": LONGEST_DRAFT}
    return LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        max_num_seqs=8,
        speculative_config=speculation,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )


def _texts(llm: Any, batch: list[str], tokens: int) -> list[list[int]]:
    """Greedy outputs as ids."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    answers = llm.generate(batch, greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def _counted_steps(engine: Any) -> list[None]:
    """Grows by one with every step of the engine."""
    steps: list[None] = []
    step = engine.step

    def counted_step() -> Any:
        steps.append(None)
        return step()

    engine.step = counted_step
    return steps


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("vllm-cpu", "arctic-inference")}


def _timed_calls() -> list[tuple[float, int, bool]]:
    """Filled while the engine runs: of each call of our proposer the seconds, the requests, and
    whether it was the first for any of them, whose prompt is indexed then."""
    from hf_retrieval_assist.extensions.vllm import Proposer

    calls: list[tuple[float, int, bool]] = []
    propose = Proposer.propose

    def timed(self: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        drafts = propose(self, sampled, *args, **kwargs)
        seconds = time.perf_counter() - started
        if sampled:
            calls.append((seconds, len(sampled), any(row.steps == 0 for row in self._rows)))
        return drafts

    Proposer.propose = timed  # type: ignore[method-assign]
    return calls


def run_part(mode: str, model: str, tokens: int, parts: Path) -> dict[str, Any]:
    """What a mode found, in a process of its own unless it is in `parts` already."""
    path = parts / f"{mode}.json"
    if not path.exists():
        arguments = ["--model", model, "--tokens", str(tokens), "--parts", str(parts)]
        command = [sys.executable, "-m", "benchmarks.vllm_engine", *arguments, "--measure", mode]
        subprocess.run(command, check=True, env=os.environ | ENVIRONMENT)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def summary(found: dict[str, Any], settings: dict[str, Any]) -> Report:
    """The tables: what each mode took, and what a call of our proposer takes."""
    report = Report("vllm", settings | found["ours"]["versions"])
    columns = {"mode": "proposer", "round": "prompts", "tokens": "tokens", "steps": "engine steps"}
    columns |= {"rate": "tokens/step", "cpu": "CPU s", "wall": "s", "equal": "equal to plain"}
    table = report.table("Prompts inside vLLM", columns)
    for mode, part in found.items():
        for name, figures in part["rounds"].items():
            plain = found["plain"]["rounds"][name]["outputs"]
            equal = sum(a == b for a, b in zip(figures["outputs"], plain, strict=True))
            count = sum(map(len, figures["outputs"]))
            table.add(
                mode=mode,
                round=ROUNDS[name],
                tokens=count,
                steps=figures["steps"],
                rate=count / figures["steps"],
                cpu=figures["cpu"],
                wall=figures["wall"],
                equal=f"{equal} of {len(plain)}",
            )
    columns = {"round": "prompts", "calls": "calls", "rows": "requests/call", "p50": "p50 us"}
    columns |= {"p90": "p90 us", "mean": "mean us", "first": "with a first one, p50 us"}
    table = report.table("propose(), per call and request", columns)
    for name, figures in found["ours"]["rounds"].items():
        table.add(round=ROUNDS[name], **_call_figures(figures["calls"]))
    return report


def _call_figures(calls: list[tuple[float, int, bool]]) -> dict[str, Any]:
    rows = np.array([count for _, count, _ in calls])
    each = 1e6 * np.array([seconds for seconds, _, _ in calls]) / rows
    first = np.array([starts for _, _, starts in calls])
    return {
        "calls": len(calls),
        "rows": float(rows.mean()),
        "p50": float(np.median(each[~first])),
        "p90": float(np.quantile(each[~first], 0.9)),
        "mean": float(each[~first].mean()),
        "first": float(np.median(each[first])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--parts", type=Path, help="what each mode found")
    parser.add_argument("--only", choices=SPECULATION, help="run this one, and print no tables")
    parser.add_argument("--measure", choices=SPECULATION, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    model, tokens = arguments.model, arguments.tokens
    if arguments.measure is not None:
        figures = json.dumps(measure(arguments.measure, model, tokens))
        (arguments.parts / f"{arguments.measure}.json").write_text(figures)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        parts = arguments.parts or Path(folder)
        parts.mkdir(parents=True, exist_ok=True)
        modes = SPECULATION if arguments.only is None else [arguments.only]
        found = {mode: run_part(mode, model, tokens, parts) for mode in modes}
    if arguments.only is not None:
        return 0
    settings = {"model": Path(model).name, "new_tokens": tokens}
    report = summary(found, settings | {"num_speculative_tokens": LONGEST_DRAFT})
    print(f"{report}\n\nwritten to {report.save(arguments.output)}")
    ours, plain = (found[mode]["rounds"] for mode in ("ours", "plain"))
    return int(any(ours[name]["outputs"] != plain[name]["outputs"] for name in ROUNDS))


if __name__ == "__main__":
    sys.exit(main())
