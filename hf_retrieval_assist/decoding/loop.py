"""The decoding loop: draft, verify in one forward, walk, keep, learn.

:meth:`Generation.step` is the loop's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from ..drafters.call_view import CallView
from ..drafters.expected import came_out
from ..drafters.feedback import RowFeedback, row_feedbacks
from ..host import transformers_private as private
from ..host.ranks import Ranks
from ..policy.cost_model import CostModel
from ..policy.cost_store import CallCosts
from ..policy.policy import Ask, AssistantSession, DraftingPolicy, Outcome
from ..policy.stats import CallStats
from ..policy.step import DraftedStep
from ..types.row_text import Path, RowText
from ..types.token_tree import Forest, Limits, TokenTree
from ..verification.own_forwards import TargetForwards
from ..verification.tiers import Service
from ..verification.verified import Verified
from .call import Call
from .forwards import Forwards
from .observer import Observer
from .selection import RowPreview
from .walk import Drawn, Walk


class Generation:
    """One call to `generate` with drafts.

    Args:
        call: what is generated.
        policy: where drafts come from.
        service: how the model is served.
        counts: the call's figures.
        observer: is told every step; None: nobody is.

    Raises:
        ValueError: residual sampling is asked of a model that is spread over processes.
    """

    def __init__(
        self,
        call: Call,
        policy: DraftingPolicy,
        service: Service,
        counts: CallStats,
        observer: Observer | None,
    ):
        self.call, self.policy, self.counts, self.observer = call, policy, counts, observer
        self.service = service
        self.ranks = Ranks.of(call.model)
        self.rows = call.texts()
        self.walk = Walk(call, self.rows, call.rows_in_lockstep(service), policy.residual)
        if self.walk.residual and self.ranks.several:
            # The other ranks would not know what the first one has drawn from.
            raise ValueError("residual: expected False with a tensor-parallel model, got True")
        self.forward = Forwards(call, policy, service, self.walk, self.ranks.several, counts)
        self.cache_outlives_call = call.cache_outlives_call(service)
        self.costs = CallCosts(policy.costs, call.kind)
        # Accounts of time differ between ranks, which have to ask together.
        self.account = None if self.ranks.several else policy.account(call.kind)
        self.own_forwards = TargetForwards()
        self.sessions: list[AssistantSession] = []
        self.whole_price: CostModel | None = None  # the last step's in which all rows were running
        # Each row's, for residual sampling.
        self.drawn: list[Drawn] | None = [] if self.walk.residual else None

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
        begun = perf_counter()
        self.forward.engine.between_steps(self.forward.verifier)
        packed = perf_counter()
        rows = self.running
        # Rows in lockstep go on when they have ended.
        drafted = [row for row in rows if row.padding is None] if self.walk.lockstep else rows
        price = self.price(len(rows))
        if len(rows) == len(self.rows):
            self.whole_price = price
        step = self.draft(drafted, price)
        trees = self.trees(rows, drafted, step)
        drafted_at = perf_counter()
        trees, verified = self.forward(trees)
        shown = perf_counter()
        paths = self.walk(trees, verified, self.drawn)
        walked = perf_counter()
        self.keep(verified, paths)
        kept = perf_counter()
        self.learn(rows, trees, verified, paths, step, price.share(verified.width))
        self.costs.learn(verified.width, kept - drafted_at, step.is_plain, verified.typical)
        step.count_host(drafted_at - packed + perf_counter() - kept)
        self.counts.count_seconds(
            pack=packed - begun,
            draft=drafted_at - packed + perf_counter() - kept,
            forward=shown - drafted_at,
            walk=walked - shown,
            cache=kept - walked,
        )
        if self.observer is not None:
            grown = [row.index for row in drafted if paths[row.index].tokens]
            proposed = zip(drafted, zip(*step.proposals, strict=True), strict=True)
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
        return self.cache_outlives_call and self.forward.verifier.lacking(self.tokens) > 0

    @property
    def tokens(self) -> int:
        """Those of the longest row."""
        return self.walk.stopping.end(self.rows)

    def price(self, rows: int) -> CostModel:
        """t(n) of the next forward as the tokens of one running row see it, so many rows being fed
        together."""
        verifier = self.forward.verifier
        length, variant = verifier.cache.slots.longest, self.forward.engine.cost_variant(verifier)
        if verifier.packed:
            return self.costs.at(length, variant, packed=rows, lockstep=self.walk.lockstep)
        return self.costs.at(length, variant, verifier.widths)

    def prefill(self) -> None:
        """transformers' own prefill, and the first token of every row."""
        outputs = self.forward.prefill()
        begun = perf_counter()
        self.own_forwards.begin(self.forward.verifier, self.rows, self.walk.stopping.deepest)
        last = Verified(outputs.logits[:, -1:], [0] * len(self.rows), outputs)
        paths = self.walk(Forest.empty(len(self.rows)), last, self.drawn)
        walked = perf_counter()
        states = self.forward.taps.features
        for i, (session, path) in enumerate(zip(self.sessions, paths, strict=True)):
            logits = outputs.logits[i] if self.policy.needs_logits else None
            shown = {name: found[i] for name, found in states.items()}
            session.begin(path.tokens, logits, shown)
        self.counts.count_seconds(prefill=walked - begun, draft=perf_counter() - walked)
        if self.observer is not None:
            self.observer.begin(paths, [session.sources() for session in self.sessions])

    def draft(self, drafted: Sequence[RowText], price: CostModel) -> DraftedStep:
        """A step with a draft of each of these rows."""

        def limits() -> Limits:
            depths = [self.walk.stopping.deepest(row) for row in drafted]
            return self.forward.verifier.limits(self.rows, drafted, depths, self.walk.lockstep)

        sessions = [self.sessions[row.index] for row in drafted]
        budget = None if self.ranks.leads and self.forward.may_draft else 0
        agree = self.ranks.agree if self.ranks.several else None
        return self.policy.draft(Ask(sessions, price, self.account, budget, limits, agree))

    def trees(
        self, rows: Sequence[RowText], drafted: Sequence[RowText], step: DraftedStep
    ) -> Forest:
        """What to verify of every row; nothing of finished ones, which bring no more tokens."""
        if not len(step.trees.token_ids):
            return Forest.empty(len(self.rows))
        forest = step.trees.spread([row.index for row in drafted], len(self.rows))
        if len(drafted) == len(rows):
            return forest
        trees, depth = list(forest), max(forest.sizes)
        for row in rows:
            if row.padding is not None:
                trees[row.index] = TokenTree.chain([row.padding] * depth, [1.0] * depth)
        return Forest.of(trees)

    def keep(self, verified: Verified, paths: Sequence[Path]) -> None:
        """Keep what was accepted in the cache."""
        self.forward.verifier.keep(self.rows, verified, [path.accepted for path in paths])

    def learn(
        self,
        rows: Sequence[RowText],
        trees: Forest,
        verified: Verified,
        paths: Sequence[Path],
        step: DraftedStep,
        width: int,
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
            needs_all, taps = self.policy.needs_all_logits, self.forward.taps
            feedbacks = row_feedbacks(grown, fed, paths, verified, taps, needs_all)
        outcomes = [
            Outcome(self.sessions[i], paths[i].tokens, fed[i], feedbacks.get(i))
            for i in [row.index for row in rows]
        ]
        self.policy.learn(step, outcomes, width)

    def rest(self) -> None:
        """A forward after the rows have ended, for the cache or for other processes."""
        if not self._cache_lacks_tokens:
            self.forward.dummy_forward()
            return
        begun = perf_counter()
        self.forward.catch_up(self.tokens)
        self.counts.count_seconds(cache=perf_counter() - begun)

    def result(self) -> Any:
        """What plain `generate` returns."""
        end, device = self.tokens, self.call.input_ids.device
        self.forward.end(end)
        if self.observer is not None:
            self.observer.end(end)
        for row in self.rows:
            # What a row generated while it waited for others.
            row.cut(end)
        texts = [
            row.generated if row.padding is None else row.generated[: row.met or end]
            for row in self.rows
        ]
        self.counts.tokens = sum(map(len, texts))
        for session, text in zip(self.sessions, texts, strict=True):
            self.counts.count_expected(*came_out(session.expected, text))
        self.counts.keeps_seed = self.walk.end(end)
        new = torch.tensor([row.fed(0, end) for row in self.rows], dtype=torch.long, device=device)
        prompts = torch.stack([row.prompt for row in self.rows])
        return self.walk.collector.result(
            torch.cat([prompts, new], dim=1),
            self.forward.returned_cache,
            self.forward.model_kwargs.get("encoder_outputs"),
            end,
        )

    def _open_sessions(self, opened: ExitStack) -> None:
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
