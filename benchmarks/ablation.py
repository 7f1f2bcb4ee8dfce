"""What each part of the planner is worth: the same requests with one part taken out.

Recorded texts, and the demo model's own, under a known t(n). The cost model sees it through noise:
8% of the time, and one timing in thirty is five times too long. Speeds follow from what was
verified and from the true t(n), so that nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant, TokenTree
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.drafters.base import Drafter, DraftSession, Feedback, Target
from hf_retrieval_assist.planning.acceptance import Calibrator
from hf_retrieval_assist.planning.account import Account
from hf_retrieval_assist.planning.cost_model import CostModel
from hf_retrieval_assist.planning.cost_store import CostKey, CostModels
from hf_retrieval_assist.planning.planner import Planner
from hf_retrieval_assist.planning.running_mean import toward

from .acceptance import cpu_time, gpu_time
from .model import first_of_each, read_prompts
from .report import Report
from .traces import Ids, Trace, read_traces

COLUMNS = {"text": "text", "curve": "t(n)", "variant": "variant", "speed": "x plain"}
PARTS = COLUMNS | {"share": "of the whole", "least": "least of the seeds", "most": "most"}
CURVES: dict[str, Callable[[int], float]] = {"GPU": gpu_time, "CPU": cpu_time}
SECOND = 1e-3  # what t(1) takes
NOISE, OUTLIERS, OUTLIER = 0.08, 0.03, 5.0


class Timings:
    """Noisy timings of a known t(n), and the true time of all that was verified."""

    def __init__(self, curve: Callable[[int], float], seed: int) -> None:
        self.curve = curve
        self.spent = 0.0
        self._random = np.random.default_rng(seed)

    def take(self, tokens: int) -> float:
        seconds = SECOND * self.curve(tokens)
        self.spent += seconds
        noise = float(np.exp(self._random.normal(0, NOISE)))
        return seconds * noise * (OUTLIER if self._random.random() < OUTLIERS else 1)


class Learnt(CostModel):
    """The package's cost model, fed with these timings instead of the machine's."""

    def __init__(self, timings: Timings) -> None:
        super().__init__("cpu" if timings.curve is cpu_time else "cuda")
        self.timings = timings

    def observe(self, tokens: int, seconds: float) -> None:
        super().observe(tokens, self.timings.take(tokens))


class Averaged(Learnt):
    """A plain running mean for each size. Between two of them t(n) is a line; beyond them it has
    the shape assumed before anything is measured."""

    def __init__(self, timings: Timings) -> None:
        super().__init__(timings)
        self._assumed = np.empty(0)
        self._means: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        mean = self._means.get(tokens, 0.0)
        self._means[tokens] = toward(mean, self.timings.take(tokens), 0.1)
        self._count += 1

    def curve(self, max_tokens: int) -> NDArray[np.float64]:
        if len(self._assumed) < max_tokens:
            self._assumed = super().curve(max_tokens).copy()
        assumed = self._assumed[:max_tokens]
        sizes = sorted(size for size in self._means if size <= max_tokens)
        if not sizes:
            return assumed
        ratios = [self._means[size] / assumed[size - 1] for size in sizes]
        factors = np.interp(np.arange(1, max_tokens + 1), sizes, ratios)
        return np.maximum.accumulate(assumed * factors)

    def spread(self, max_tokens: int, reference: int) -> NDArray[np.float64]:
        return np.zeros(max_tokens)


class Fixed(Calibrator):
    """The drafters' own priors."""

    def judge(self, *arguments: Any) -> None:
        pass


def _uncalibrated(assistant: Assistant) -> None:
    made = assistant.calibrators
    assistant.calibrators = lambda fingerprint: tuple(  # type: ignore[method-assign]
        Fixed(drafter.priors(), calibrator.beside)
        for drafter, calibrator in zip(assistant.drafters, made(fingerprint), strict=True)
    )


def _without_trials(assistant: Assistant) -> None:
    assistant.planner.exploration = 0.0


def _always(nodes: int) -> Callable[[Assistant], None]:
    def change(assistant: Assistant) -> None:
        assistant.planner = Planner(nodes)

    return change


@dataclass(frozen=True)
class Variant:
    """An assistant with a part taken out.

    Attributes:
        change: takes it out.
        cost: the cost model.
    """

    change: Callable[[Assistant], None] = lambda assistant: None
    cost: type[Learnt] = Learnt


VARIANTS = {
    "whole": Variant(),
    "plain averages instead of the Kalman filter": Variant(cost=Averaged),
    "no trials": Variant(_without_trials),
    "no calibration at all": Variant(_uncalibrated),
    "always 8 nodes": Variant(_always(8)),
    "always 32 nodes": Variant(_always(32)),
}


def shares(
    trace: Trace, curve: Callable[[int], float], seeds: Sequence[int]
) -> dict[str, list[tuple[float, float]]]:
    """For each variant and seed: tokens per second over plain decoding's, and over the whole's."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        speeds = {}
        for name, variant in VARIANTS.items():
            assistant = SamAssistant(memory=OutputMemory())
            variant.change(assistant)
            cost = variant.cost(Timings(curve, seed))
            account = account_of(assistant)
            tokens = replay(assistant, trace.requests, cost, trace.vocab_size, account)
            speeds[name] = tokens * SECOND / cost.timings.spent
            found[name].append((speeds[name], speeds[name] / speeds["whole"]))
    return found


def replay(
    assistant: Assistant,
    requests: Sequence[tuple[Ids, Ids]],
    cost: Learnt,
    vocab_size: int,
    account: Account | None,
) -> int:
    """The tokens that steps brought."""
    target = Target(vocab_size, fingerprint="simulation")
    tokens = 0
    for prompt, output in requests:
        session = assistant.start(np.asarray(prompt, np.int32), target)
        session.begin(output[:1].tolist())
        done = 1
        while done < len(output):
            drafting = None if account is None else account.begin(cost)
            depths = [len(output) - done - 1]
            drafts = assistant.propose([session], depths, cost, drafting=drafting)
            (tree,) = assistant.plan(drafts, cost, drafting=drafting)
            cost.observe(1 + len(tree), 0.0)
            new = output[done : done + 1 + len(tree.follow(output[done:]))].tolist()
            assistant.commit([session], [new], [None], drafting)
            if drafting is not None:
                assistant.settle(drafting, [session], [tree], [new], 1 + len(tree))
            done += len(new)
        tokens += max(len(output) - 1, 0)
        session.close()
    return tokens


def account_of(assistant: Assistant) -> Account | None:
    return assistant.account(CostKey("simulation", "", "", ""))


# -------------------------------------------------------------------------- costly drafters


class Seer(Drafter):
    """A drafter that costs time: it knows the text, and errs in one of five tokens."""

    name = "seer"
    costly = True
    length, accuracy, price = 4, 0.8, 0.3  # price: in units of t(1)

    def __init__(self) -> None:
        self.text: Ids = np.empty(0, np.int32)
        self.asked = 0

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> SeerSession:
        return SeerSession(self)

    def priors(self) -> NDArray[np.float32]:
        return np.array([self.accuracy], np.float32)


class SeerSession(DraftSession):
    def __init__(self, seer: Seer) -> None:
        self._seer = seer
        self._done = 0
        self._random = np.random.default_rng(len(seer.text))

    def propose(self, budget: int) -> TokenTree:
        seer, started = self._seer, time.perf_counter()
        seer.asked += 1
        tokens = seer.text[self._done : self._done + min(seer.length, budget)].copy()
        wrong = self._random.random(len(tokens)) > seer.accuracy
        tokens[wrong] ^= 1
        rates = seer.accuracy ** np.arange(1, len(tokens) + 1)
        tree = TokenTree.chain(tokens, rates, np.zeros(len(tokens), np.int32))
        while time.perf_counter() - started < seer.price * SECOND:
            pass
        return tree

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self._done += len(token_ids)


ASKED = ("asked where it pays", "always asked", "never asked")


def speed_beside(trace: Trace, curve: Callable[[int], float], asked: str) -> float:
    """As `replay`, with a costly drafter, whose time counts."""
    seer = Seer()
    fallback = None if asked == "never asked" else seer
    assistant = SamAssistant(fallback=fallback, memory=OutputMemory())
    account = None if asked == "always asked" else account_of(assistant)
    cost, tokens = Learnt(Timings(curve, 0)), 0
    for request in trace.requests:
        seer.text = request[1]
        tokens += replay(assistant, [request], cost, trace.vocab_size, account)
    return tokens * SECOND / (cost.timings.spent + seer.asked * seer.price * SECOND)


# ------------------------------------------------------------------------------ demo model


class OneModel(CostModels):
    """A store that has one cost model for everything."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self.cost = cost

    def get(self, key: CostKey) -> CostModel:
        return self.cost


def generate(
    loaded: tuple[Any, Any],
    variant: Variant,
    curve: Callable[[int], float],
    prompts: int,
    tokens: int,
) -> float:
    """Tokens per second over those of plain decoding, for the demo model's greedy outputs."""
    model, tokenizer = loaded
    cost = variant.cost(Timings(curve, 0))
    assistant = SamAssistant(memory=OutputMemory(), costs=OneModel(cost))
    variant.change(assistant)
    for prompt in first_of_each(read_prompts(), prompts):
        inputs = tokenizer(prompt.text, return_tensors="pt")
        model.generate(**inputs, assistant=assistant, max_new_tokens=tokens, do_sample=False)
    total = assistant.stats.total
    return (total.steps + total.accepted) * SECOND / cost.timings.spent


# ------------------------------------------------------------------------------ the benchmark


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--ablation-requests", type=int, default=20, help="of each trace")
    parser.add_argument("--ablation-seeds", type=int, default=3, help="of the timings' noise")
    parser.add_argument("--ablation-prompts", type=int, default=1, help="of each category")
    parser.add_argument("--ablation-tokens", type=int, default=64, help="for each prompt")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    requests = 2 if arguments.quick else arguments.ablation_requests
    prompts = 0 if arguments.quick else arguments.ablation_prompts
    seeds = range(1 if arguments.quick else arguments.ablation_seeds)
    settings = {
        "requests": requests,
        "seeds": len(seeds),
        "prompts": prompts,
        "tokens": arguments.ablation_tokens,
    }
    report = Report("ablation", settings)
    table = report.table("The planner less a part", PARTS)
    asked = report.table("A costly drafter, asked or not", COLUMNS)
    for trace in (trace.head(requests) for trace in read_traces(arguments.traces)):
        for curve_name, curve in CURVES.items():
            progress(f"{trace.name}, {curve_name}")
            place = {"text": trace.name, "curve": curve_name}
            for name, found in shares(trace, curve, seeds).items():
                speeds, parts = zip(*found, strict=True)
                table.add(
                    **place,
                    variant=name,
                    speed=mean(speeds),
                    share=mean(parts),
                    least=min(parts),
                    most=max(parts),
                )
            for when in ASKED:
                speed = speed_beside(trace, curve, when)
                asked.add(**place, variant=when, speed=speed)
    if prompts:
        model = load_demo_model()
        for curve_name, curve in CURVES.items():
            for name, variant in VARIANTS.items():
                progress(f"demo model, {curve_name}, {name}")
                speed = generate(model, variant, curve, prompts, arguments.ablation_tokens)
                table.add(text="demo model", curve=curve_name, variant=name, speed=speed)
    return report
