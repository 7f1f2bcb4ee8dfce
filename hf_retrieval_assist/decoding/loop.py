"""The decoding loop: draft, verify in one forward, walk, keep, learn.

:meth:`Generation.step` is the loop's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..drafters.call_view import CallView
from ..drafters.expected import came_out
from ..drafters.feedback import RowFeedback, row_feedbacks
from ..host import transformers_private as private
from ..host.feature_taps import FeatureTaps
from ..host.ranks import Ranks
from ..policy.cost_model import CostModel
from ..policy.cost_store import CallCosts
from ..policy.policy import Ask, AssistantSession, DraftingPolicy, Outcome
from ..policy.stats import CallStats
from ..policy.step import DraftedStep
from ..types.row_text import Path, RowText
from ..types.token_tree import Forest, Limits
from ..verification.options import CallOptions
from ..verification.own_forwards import TargetForwards
from ..verification.tiers import Service, Tier
from ..verification.verified import Verified
from ..verification.verifier import Verifier
from .call import Call
from .kept_prefix import KeptPrefix
from .selection import RowPreview
from .walk import Drawn, Walk


class Lap:
    """Seconds of a call's phases.

    Args:
        counts: where they are counted.
    """

    def __init__(self, counts: CallStats) -> None:
        self._seconds, self._begun = counts.seconds, 0.0

    def begin(self) -> None:
        """Count from now on."""
        self._begun = perf_counter()

    def __call__(self, phase: str) -> float:
        """Count what a phase took that has ended now, and begin the next one; returns it."""
        begun, self._begun = self._begun, perf_counter()
        seconds = self._begun - begun
        self._seconds[phase] += seconds
        return seconds


class Generation:
    """One call to `generate` with drafts.

    Args:
        call: what is generated.
        policy: where drafts come from.
        service: how the model is served.
        kept: takes the call's text to later ones; None: nobody does.
        counts: the call's figures.
        observer: is told every step; None: nobody is.

    Raises:
        ValueError: residual sampling is asked of a model that is spread over processes.
    """

    verifier: Verifier  # once the prompt is fed

    def __init__(
        self,
        call: Call,
        policy: DraftingPolicy,
        service: Service,
        kept: KeptPrefix | None,
        counts: CallStats,
        observer: Any,
    ):
        self.call, self.policy, self.counts, self.observer = call, policy, counts, observer
        self.service, self.kept = service, kept
        self.ranks = Ranks.of(call.model)
        self.rows = call.texts()
        self.walk = Walk(call, self.rows, policy.residual)
        if self.walk.residual and self.ranks.several:
            # The other ranks would not know what the first one has drawn from.
            raise ValueError("residual: expected False with a tensor-parallel model, got True")
        self.taps = FeatureTaps(call.model, policy.hidden_layers)
        self.cache_outlives_call = call.cache_outlives_call(service)
        self.costs = CallCosts(policy.costs, call.kind)
        # Accounts of time differ between ranks, which have to ask together.
        self.account = None if self.ranks.several else policy.account(call.kind)
        self.own_forwards = TargetForwards()
        self.sessions: list[AssistantSession] = []
        self.whole_price: CostModel | None = None  # the last step's in which all rows were running
        # Each row's, for residual sampling.
        self.drawn: list[Drawn] | None = [] if self.walk.residual else None
        self.lap = Lap(counts)

    def run(self) -> Any:
        """The whole call; what plain `generate` returns."""
        device, synced = self.call.input_ids.device, self.call.synced_gpus
        with self.ranks, ExitStack() as opened:
            self.open_sessions(opened)
            self.ranks.begin()
            try:
                self.first_tokens(self.prefill())
                # The criteria may be met by the first token; other processes may still wait.
                while private.has_unfinished(self.call.model, self.finished, synced, device):
                    if self.running:
                        self.step()
                    else:
                        self.rest()
                return self.result()
            except BaseException:
                if hasattr(self, "verifier"):  # a prefill that does not end takes itself back
                    self.verifier.leave(None)
                raise

    def step(self) -> None:
        """Verify one tree of every running row in one forward."""
        lap, rows = self.lap, self.running
        lap.begin()
        self.verifier.prepare()
        lap("pack")
        step = self.draft(rows)
        drafting = lap("draft")
        trees, verified = self.verifier.verify(self.rows, self.trees(rows, step))
        verifying = lap("forward")
        paths = self.walk(trees, verified, self.drawn)
        verifying += lap("walk")
        self.verifier.keep(self.rows, verified, [path.accepted for path in paths])
        verifying += lap("cache")
        self.learn(rows, trees, verified, paths, step)
        self.costs.learn(verified.width, verifying, step.is_plain, verified.typical)
        step.count_host(drafting + lap("draft"))
        if self.observer is not None:
            grown = [row.index for row in rows if paths[row.index].tokens]
            proposed = zip(rows, zip(*step.proposals, strict=True), strict=True)
            drafts = {row.index: proposals for row, proposals in proposed}
            self.observer.step(grown, drafts, trees, paths)

    @property
    def undrafted_step(self) -> float | None:
        """Seconds of a step of all rows without a draft; None where none was timed."""
        return None if self.whole_price is None else self.whole_price.timed(1)

    @property
    def running(self) -> list[RowText]:
        return [row for row in self.rows if not row.finished]

    @property
    def finished(self) -> bool:
        return not self.running and not self._cache_lacks_tokens

    @property
    def _cache_lacks_tokens(self) -> bool:
        """Whether the rows have ended, and the cache must be given more of their text."""
        return self.cache_outlives_call and self.verifier.lacking(self.tokens) > 0

    @property
    def tokens(self) -> int:
        """Those of the longest row."""
        return self.walk.stopping.end(self.rows)

    def price(self, rows: int) -> CostModel:
        """t(n) of the next forward as the tokens of one running row see it, so many rows being fed
        together."""
        verifier = self.verifier
        length, variant = verifier.cache.slots.longest, verifier.cost_variant
        if verifier.packed:
            return self.costs.at(length, variant, verifier.widths, packed=rows)
        return self.costs.at(length, variant, verifier.widths)

    def prefill(self) -> Any:
        """transformers' own prefill; what the model returned."""
        call, policy, kept = self.call, self.policy, self.kept
        options = CallOptions(
            batch=call.batch_size,
            capacity=call.prompt_length + call.room,
            taps=self.taps,
            top_k=policy.top_k,
            all_logits=policy.needs_all_logits,
            select=self.walk.rowwise,
            cache_outlives_call=self.cache_outlives_call or (kept is not None and kept.keeps),
            recorded=call.may_record(policy.graphs) and not self.service.foreign,
            fused=policy.graphs == "fused",
            fixed_width=policy.fixed_width,
            reroute=policy.reroute,
            extra_memory=policy.extra_memory,
            several=self.ranks.several,
        )
        self.lap.begin()
        begun = call.engine.prefill(
            self.service, call.model, call.input_ids, call.config, call.model_kwargs, options
        )
        self.verifier, self.returned_cache = begun.verifier, begun.returned_cache
        if begun.why_plain is not None:
            self.counts.tier, self.counts.reason = Tier.PLAIN.value, begun.why_plain
        self.lap("prefill")
        return begun.outputs

    def first_tokens(self, outputs: Any) -> None:
        """The first token of every row, of which sessions begin."""
        self.own_forwards.begin(self.verifier, self.rows, self.walk.stopping.deepest)
        last = Verified(outputs.logits[:, -1:], [0] * len(self.rows), outputs)
        paths = self.walk(Forest.empty(len(self.rows)), last, self.drawn)
        self.lap("prefill")
        states = self.taps.features
        for i, (session, path) in enumerate(zip(self.sessions, paths, strict=True)):
            logits = outputs.logits[i] if self.policy.needs_logits else None
            shown = {name: found[i] for name, found in states.items()}
            session.begin(path.tokens, logits, shown)
        self.lap("draft")
        if self.observer is not None:
            self.observer.begin(paths)

    def draft(self, rows: Sequence[RowText]) -> DraftedStep:
        """A step with a draft of each of the running rows."""
        price = self.price(len(rows))
        if len(rows) == len(self.rows):
            self.whole_price = price
        sessions = [self.sessions[row.index] for row in rows]
        budget = None if self.ranks.leads and self.verifier.may_draft else 0
        agree = self.ranks.agree if self.ranks.several else None
        limits = partial(self.limits, rows)
        return self.policy.draft(Ask(sessions, price, self.account, budget, limits, agree))

    def limits(self, rows: Sequence[RowText]) -> Limits:
        """What the next forward can verify of these rows' drafts."""
        depths = [self.walk.stopping.deepest(row) for row in rows]
        return self.verifier.limits(self.rows, rows, depths)

    def trees(self, rows: Sequence[RowText], step: DraftedStep) -> Forest:
        """What to verify of every row; nothing of finished ones, which bring no more tokens."""
        if not len(step.trees.token_ids):
            return Forest.empty(len(self.rows))
        return step.trees.spread([row.index for row in rows], len(self.rows))

    def learn(
        self,
        rows: Sequence[RowText],
        trees: Forest,
        verified: Verified,
        paths: Sequence[Path],
        step: DraftedStep,
    ) -> None:
        """Count the step, and tell drafters and the account what it showed."""
        grown = [row for row in rows if paths[row.index].tokens]
        self.counts.count_steps(
            len(grown),
            sum([trees.sizes[row.index] for row in grown]),
            sum([len(paths[row.index].tokens) - 1 for row in grown]),
        )
        fed = [*trees]
        feedbacks: dict[int, RowFeedback] = {}
        if self.policy.needs_feedback and (self.policy.hidden_layers or not step.is_plain):
            needs_all = self.policy.needs_all_logits
            feedbacks = row_feedbacks(grown, fed, paths, verified, self.taps, needs_all)
        outcomes = [
            Outcome(self.sessions[i], paths[i].tokens, fed[i], feedbacks.get(i))
            for i in [row.index for row in rows]
        ]
        assert step.price is not None
        self.policy.learn(step, outcomes, step.price.share(verified.width))

    def rest(self) -> None:
        """A forward after the rows have ended, for the cache or for other processes."""
        self.lap.begin()
        self.verifier.rest(self.rows, self.tokens)
        self.lap("cache")

    def result(self) -> Any:
        """What plain `generate` returns."""
        end, device = self.tokens, self.call.input_ids.device
        verifier, counts = self.verifier, self.counts
        verifier.leave(end)
        counts.attention, counts.forwards = verifier.attention_by, verifier.forwards
        counts.repeated, counts.recordings = verifier.repeated, verifier.recordings
        if self.observer is not None:
            self.observer.end(end)
        for row in self.rows:
            # What a row generated while it waited for others.
            row.cut(end)
        self.counts.tokens = sum([len(row.generated) for row in self.rows])
        for session, row in zip(self.sessions, self.rows, strict=True):
            self.counts.count_expected(*came_out(session.expected, row.generated))
        self.counts.keeps_seed = self.walk.end(end)
        new = torch.tensor([row.fed(0, end) for row in self.rows], dtype=torch.long, device=device)
        prompts = torch.stack([row.prompt for row in self.rows])
        sequences = torch.cat([prompts, new], dim=1)
        if self.kept is not None:
            self.kept.leave(sequences[0], self.returned_cache)
        return self.walk.collector.result(
            sequences,
            self.returned_cache,
            self.call.model_kwargs.get("encoder_outputs"),
            end,
        )

    def open_sessions(self, opened: ExitStack) -> None:
        """Start a draft session for every row, all of which are closed, whatever happens."""
        call = self.call
        graphs = call.may_record(self.policy.graphs)
        for row, prompt_ids in zip(self.rows, call.prompts, strict=True):
            view = CallView(
                RowPreview(self.walk.select, row),
                self.own_forwards,
                tuple(call.processors),
                row.index,
                graphs,
                self.policy.extra_memory,
                counts_costs=self.account is not None,
            )
            target = replace(call.target, call=view)
            session = self.policy.start(prompt_ids, target, row.index, call.batch_size)
            opened.callback(session.close)
            self.sessions.append(session)
            if self.drawn is not None:
                self.drawn.append(session.draw_at)
