"""The decoding loop: propose, plan, verify in one forward, walk, keep, learn.

:meth:`Generation.step` is the loop's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..drafters.feedback import RowFeedback, row_feedbacks
from ..host import transformers_private as private
from ..host.model_state import ModelWatch
from ..host.ranks import Ranks
from ..policy.account import Drafting
from ..policy.policy import AssistantSession, DraftingPolicy
from ..policy.stats import CallStats, Stopwatch
from ..types.row_text import Path, RowText
from ..types.token_tree import Forest, TokenTree
from ..verification.own_forwards import OwnForwards
from ..verification.tiers import Service
from ..verification.verified import Verified
from .call import Call
from .forwards import Forwards
from .observer import Observer
from .pricing import Pricing
from .selection import RowPreview
from .walk import Drawn, Walk


class Generation:
    """One call to `generate` with drafts.

    Args:
        call: what is generated.
        assistant: where drafts come from.
        service: how the model is served.
        counts: the call's figures.
        record: is told every step; None: nobody is.

    Raises:
        ValueError: residual sampling is asked of a model that is spread over processes.
    """

    def __init__(
        self,
        call: Call,
        assistant: DraftingPolicy,
        service: Service,
        counts: CallStats,
        record: Observer | None,
    ):
        self.call, self.assistant, self.counts, self.record = call, assistant, counts, record
        self.ranks = Ranks.of(call.model)
        self.rows = call.texts()
        self.walk = Walk(call, self.rows, call.rows_in_step(service), assistant.residual)
        if self.walk.residual and self.ranks.several:
            # The other ranks would not know what the first one has drawn from.
            raise ValueError("residual: expected False with a tensor-parallel model, got True")
        self.forward = Forwards(call, assistant, service, self.walk, self.ranks.several, counts)
        self.keeps_cache = call.keeps_cache(service)
        self.pricing = Pricing(call, assistant, self.walk.in_step, not self.ranks.several)
        self.own_forwards = OwnForwards()
        self.sessions: list[AssistantSession] = []

    def run(self) -> Any:
        """The whole call; what plain `generate` returns."""
        device, synced = self.call.input_ids.device, self.call.synced_gpus
        with self.ranks, ExitStack() as opened:
            try:
                opened.enter_context(self.forward)
                self._open_sessions(opened)
                self.ranks.begin()
                self.prefill()
                # The criteria may be met by the first token; other processes may still wait.
                while private.has_unfinished(self.call.model, self.finished, synced, device):
                    if self.running:
                        self.step()
                    else:
                        self.rest()
                return self.result()
            except BaseException:
                self.forward.abandon()
                raise

    def step(self) -> None:
        """Verify one tree of every running row in one forward."""
        lap = Stopwatch(self.counts.seconds).lap
        if (watch := self.walk.watch) is not None and watch.changed:
            self.forward.go_on_plainly()
        self.forward.pack_due()
        lap("pack")
        rows = self.running
        drafting = self.pricing.begin(self.forward.verifier, len(rows), self.forward.cost_variant)
        drafts = self.propose(rows, drafting)
        trees = self.plan(rows, drafts, drafting)
        lap("draft")
        trees, verified = self.forward(trees)
        if watch is not None:
            watch.look()
        seconds = lap("forward")
        paths = self.walk(trees, verified, self._drawn)
        seconds += lap("walk")
        self.keep(verified, paths)
        seconds += lap("cache")
        self.learn(rows, trees, verified, paths, drafting)
        lap("draft")
        self.pricing.end(drafting, verified, seconds)
        if self.record is not None:
            grown = [row.index for row in rows if paths[row.index].tokens]
            drafted = [session.drafts for session in self.sessions]
            self.record.step(grown, drafted, trees, paths)

    @property
    def running(self) -> list[RowText]:
        return [row for row in self.rows if not row.finished]

    @property
    def finished(self) -> bool:
        return not self.running and not self._lacks_tokens

    @property
    def _lacks_tokens(self) -> bool:
        """Whether the rows have ended, and the cache must be given more of their text."""
        return self.keeps_cache and self.forward.verifier.lacking(self.tokens) > 0

    @property
    def tokens(self) -> int:
        """Of the longest row."""
        return self.walk.stopping.end(self.rows)

    @property
    def plain_step(self) -> float | None:
        """Seconds that a step without drafts is expected to take; None: no step was timed yet."""
        forward = self.forward
        cost = self.pricing.price(forward.verifier, len(self.rows), forward.cost_variant)
        return cost.seconds(1) if cost.known else None

    def prefill(self) -> None:
        """transformers' own prefill, and the first token of every row."""
        outputs = self.forward.prefill()
        lap = Stopwatch(self.counts.seconds).lap
        self.own_forwards.begin(self.forward.verifier, self.rows, self.walk.stopping.deepest)
        if self.call.asks_caller and (lookups := self.forward.lookups) is not None:
            self.walk.watch = ModelWatch(self.call.model, lookups)
        self.walk.recorder.prefill(outputs, self.forward.cache)
        last = Verified(outputs.logits[:, -1:], [0] * len(self.rows), outputs)
        paths = self.walk([TokenTree.empty()] * len(self.rows), last, self._drawn)
        lap("prefill")
        states = self.forward.taps.features
        for i, (session, path) in enumerate(zip(self.sessions, paths, strict=True)):
            logits = outputs.logits[i] if self.assistant.needs_logits else None
            shown = {name: found[i] for name, found in states.items()}
            session.begin(path.tokens, logits, shown)
        lap("draft")
        if self.record is not None:
            self.record.begin(paths)

    @property
    def _drawn(self) -> list[Drawn] | None:
        return [session.draw_at for session in self.sessions] if self.walk.residual else None

    def _drafted(self, rows: Sequence[RowText]) -> Sequence[RowText]:
        """Those of the running rows that are drafted for: in step, rows that have ended go on."""
        return [row for row in rows if row.padding is None] if self.walk.in_step else rows

    def propose(self, rows: Sequence[RowText], drafting: Drafting) -> Forest:
        """A draft of each row that is drafted for."""
        drafted = self._drafted(rows)
        if not (self.ranks.leads and self.forward.may_draft):
            return Forest.empty(len(drafted))
        return self.assistant.propose([self.sessions[row.index] for row in drafted], drafting)

    def plan(
        self, rows: Sequence[RowText], drafts: Forest, drafting: Drafting
    ) -> Sequence[TokenTree]:
        """What to verify of every row; nothing of finished ones, which bring no more tokens."""
        drafted, in_step = self._drafted(rows), self.walk.in_step
        if not (drafts.nodes or self.ranks.several):
            drafting.planner.plan(drafts, drafting.price)
            return [TokenTree.empty()] * len(self.rows)
        depths = [self.walk.stopping.deepest(row) for row in drafted]
        limits = self.forward.verifier.limits(self.rows, drafted, depths, in_step)
        own = drafting.planner.plan(drafts, drafting.price, limits)
        planned = self.ranks.agree(own, len(drafted))
        trees = [TokenTree.empty()] * len(self.rows)
        for row in rows if in_step else ():
            if row.padding is not None:
                depth = len(planned[0])
                trees[row.index] = TokenTree.chain([row.padding] * depth, [1.0] * depth)
        for row, tree in zip(drafted, planned, strict=True):
            trees[row.index] = tree
        return trees

    def keep(self, verified: Verified, paths: Sequence[Path]) -> None:
        """Keep what was accepted in the cache, and of the states what the call returns."""
        if self.walk.recorder.wants_states:
            self.walk.recorder.step(verified, paths[0].accepted, self.forward.cache)
        self.forward.verifier.keep(self.rows, verified, [path.accepted for path in paths])

    def learn(
        self,
        rows: Sequence[RowText],
        trees: Sequence[TokenTree],
        verified: Verified,
        paths: Sequence[Path],
        drafting: Drafting,
    ) -> None:
        """Count the step, and tell drafters and the account what it showed."""
        grown = [row for row in rows if paths[row.index].tokens]
        self.counts.count_steps(
            len(grown),
            sum([len(trees[row.index]) for row in grown]),
            sum([len(paths[row.index].tokens) - 1 for row in grown]),
        )
        feedbacks: Sequence[RowFeedback | None] = [None] * len(grown)
        if self.assistant.needs_feedback and (
            self.assistant.hidden_layers or not drafting.is_plain
        ):
            needs_all, taps = self.assistant.needs_all_logits, self.forward.taps
            feedbacks = row_feedbacks(grown, trees, paths, verified, taps, needs_all)
        self.assistant.commit(
            [self.sessions[row.index] for row in grown],
            [paths[row.index].tokens for row in grown],
            feedbacks,
            drafting,
        )
        self.assistant.end(
            drafting,
            [self.sessions[row.index] for row in rows],
            [trees[row.index] for row in rows],
            [paths[row.index].tokens for row in rows],
            drafting.width(verified.width),
        )

    def rest(self) -> None:
        """A forward after the rows have ended, for the cache or for other processes."""
        if not self._lacks_tokens:
            self.forward.keep_company()
            return
        lap = Stopwatch(self.counts.seconds).lap
        self.forward.catch_up(self.tokens)
        lap("cache")

    def result(self) -> Any:
        """What plain `generate` returns."""
        end, device = self.tokens, self.call.input_ids.device
        self.forward.end(end)
        if self.record is not None:
            self.record.finish(end)
        for row in self.rows:
            # What a row generated while it waited for others.
            row.cut(end)
        self.counts.tokens = sum(
            len(row.generated) if row.padding is None else min(row.met or end, end)
            for row in self.rows
        )
        self.counts.keeps_seed = self.walk.end(end)
        new = torch.tensor([row.fed(0, end) for row in self.rows], dtype=torch.long, device=device)
        prompts = torch.stack([row.prompt for row in self.rows])
        return self.walk.recorder.result(
            torch.cat([prompts, new], dim=1),
            self.forward.returned_cache,
            self.forward.model_kwargs.get("encoder_outputs"),
            end,
        )

    def _open_sessions(self, opened: ExitStack) -> None:
        """Start a draft session for every row, all of which are closed, whatever happens."""
        call = self.call
        graphs = call.may_record(self.assistant.graphs)
        for row, prompt_ids in zip(self.rows, call.prompts, strict=True):
            preview = RowPreview(self.walk.select, row)
            target = replace(call.target, preview=preview, own=self.own_forwards, graphs=graphs)
            session = self.assistant.start(prompt_ids, target, row.index, call.batch_size)
            opened.callback(self._close, session)
            self.sessions.append(session)

    def _close(self, session: AssistantSession) -> None:
        self.counts.count_expected(session.expected.accepted, session.expected.rejected)
        session.close()
