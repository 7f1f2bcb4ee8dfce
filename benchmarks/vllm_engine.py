"""The proposer inside vLLM, on the demo model: the same outputs, and what they took.

    python -m benchmarks.vllm_engine --model FOLDER [--tokens 40]

Runs plain decoding, vLLM's own n-gram and suffix proposers, and ours, each in a process of its own,
over 24 prompts: one by one, one by one again, and as one batch. Exits with 1 where an output is not
that of plain decoding. Needs the environment that `make test-vllm` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONGEST_DRAFT = 12
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "ours": {"model": "hf_retrieval_assist.vllm.Proposer"},
}
ROUNDS = ("first", "again", "batch")
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
    """Those of the benchmark on the demo model, and the demo's."""
    here = Path(__file__).parent
    kinds = [json.loads(file.read_text()) for file in sorted((here / "prompts").glob("*.json"))]
    shown = sorted((here.parent / "examples" / "data").glob("*.txt"))
    texts = [prompt["text"] for kind in kinds for prompt in kind["prompts"]]
    return texts + [file.read_text() for file in shown]


def measure(mode: str, model: str, tokens: int) -> dict[str, Any]:
    """Outputs, engine steps and seconds of each round."""
    from vllm import LLM, SamplingParams

    speculation = SPECULATION[mode]
    if speculation is not None:
        speculation = speculation | {"num_speculative_tokens": LONGEST_DRAFT}
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        max_num_seqs=8,
        speculative_config=speculation,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    engine, steps = llm.llm_engine, 0
    step = engine.step

    def counted_step() -> Any:
        nonlocal steps
        steps += 1
        return step()

    engine.step = counted_step
    proposer = _timed_proposer(llm) if mode == "ours" else {}
    llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    rounds = {}
    for name in ROUNDS:
        batches = [prompts()] if name == "batch" else [[prompt] for prompt in prompts()]
        steps, cpu, wall = 0, time.process_time(), time.perf_counter()
        outputs = [
            list(answer.outputs[0].token_ids)
            for batch in batches
            for answer in llm.generate(batch, greedy, use_tqdm=False)
        ]
        rounds[name] = {
            "outputs": outputs,
            "steps": steps,
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
        }
    return {"rounds": rounds, "proposer": proposer}


def _timed_proposer(llm: Any) -> dict[str, float]:
    """Counts of calls and rows, and seconds, filled while the engine runs."""
    from hf_retrieval_assist.vllm import Proposer

    spent = {"calls": 0, "rows": 0, "seconds": 0.0}
    propose = Proposer.propose

    def timed(self: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        drafts = propose(self, sampled, *args, **kwargs)
        spent["seconds"] += time.perf_counter() - started
        spent["calls"] += 1
        spent["rows"] += len(sampled)
        return drafts

    Proposer.propose = timed  # type: ignore[method-assign]
    return spent


def run_all(model: str, tokens: int) -> int:
    """Every mode in a process of its own; prints a table. Returns the exit code."""
    found: dict[str, Any] = {}
    for mode in SPECULATION:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            arguments = [mode, "--model", model, "--tokens", str(tokens), "--output", file.name]
            subprocess.run(
                [sys.executable, "-m", "benchmarks.vllm_engine", *arguments],
                check=True,
                env=os.environ | ENVIRONMENT,
            )
            found[mode] = json.load(file)
        _print_mode(mode, found[mode], found["plain"])
    ours = found["ours"]["rounds"]
    wrong = [differing(ours[name], found["plain"]["rounds"][name]) for name in ROUNDS]
    return int(any(wrong))


def differing(some: dict[str, Any], others: dict[str, Any]) -> int:
    """How many outputs of two rounds are not the same."""
    return sum(a != b for a, b in zip(some["outputs"], others["outputs"], strict=True))


def _print_mode(mode: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, figures in found["rounds"].items():
        count = sum(map(len, figures["outputs"]))
        print(
            f"{mode:7}{name:6}{count:6} tokens{figures['steps']:6} engine steps"
            f"{figures['cpu']:8.1f} CPU s{figures['wall']:8.1f} s, "
            f"{differing(figures, plain['rounds'][name])} outputs differ from plain's",
            flush=True,
        )
    if spent := found["proposer"]:
        microseconds = 1e6 * spent["seconds"]
        print(
            f"{mode:7}{microseconds / spent['calls']:.0f} us per call, "
            f"{microseconds / spent['rows']:.0f} us per call and row",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", nargs="?", choices=SPECULATION)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.mode is None:
        return run_all(arguments.model, arguments.tokens)
    found = measure(arguments.mode, arguments.model, arguments.tokens)
    arguments.output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
