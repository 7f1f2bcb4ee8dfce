"""The decoding loop: propose, plan, verify in one forward, walk, keep, learn.

:meth:`Generation.step` is the loop's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..drafters.feedback import RowFeedback, row_feedbacks
from ..drafting.policy import AssistantSession, DraftingPolicy
from ..host import transformers_private as private
from ..host.callers_hooks import HookWatch
from ..host.feature_taps import FeatureTaps
from ..host.fingerprint import fingerprint
from ..host.ranks import Ranks
from ..kernels.linear import MAX_ROWS
from ..kernels.reroute import reroute
from ..planning.account import Drafting
from ..planning.cost_model import CostModel
from ..planning.cost_store import CostKey, size_bucket
from ..planning.cost_views import PackedCost, stepped
from ..row_text import Path, RowText
from ..stats import CallStats, Timed
from ..system.log import get_logger
from ..token_tree import TokenTree
from ..verification.fixed_verifier import ForwardOptions
from ..verification.own_forwards import OwnForwards
from ..verification.tiers import Service, slot_cache
from ..verification.verified import Verified
from ..verification.verifiers import Verifier
from .call import PER_TOKEN, Call
from .copies import Copies
from .dice import Dice, RowForesight
from .node_choices import NodeChoices
from .recorder import OutputRecorder
from .selection import TokenSelector
from .stopping import Stopping
from .walk import Walk, drafts_in_step

if TYPE_CHECKING:
    from ..record import CallRecord

logger = get_logger(__name__)

# Steps without drafts are all alike: one in so many is timed.
_TIMING_PERIOD = 8

# Of forwards for which the experts' weights may be copied token by token; plain decoding does so
# for one token a row.
_FEW_TOKENS = 2


class UnservableError(Exception):
    """What the prefill has shown of a model that no draft can be verified with."""


class Generation:
    """One call to `generate`: its rows, their draft sessions, the cache and the outputs."""

    def __init__(
        self,
        call: Call,
        assistant: DraftingPolicy,
        service: Service,
        counts: CallStats,
        record: CallRecord | None,
    ):
        self.call = call
        self.record = record
        self.model = call.model
        self.assistant = assistant
        self.service = service
        self.counts = counts
        self.stopping = Stopping(call.criteria)
        self.outputs = OutputRecorder(call.config, call.batch_size)
        self.room = self._room()
        self.rows = self._texts()
        self.select = TokenSelector(call.processors, call.config.do_sample, call.batch_size)
        self.dice = Dice(self.rows)
        self.own_forwards = OwnForwards()
        self.in_step = call.rows_in_step(service)
        self.walk = Walk(
            *(self.rows, self.select, self.stopping, self.outputs, self.dice, call.streamer),
            in_step=self.in_step,
        )
        self.residual = assistant.residual and self.select.do_sample
        self.model_kwargs = dict(call.model_kwargs)
        self.keeps_cache = call.keeps_cache(service)
        capacity = call.prompt_length + self.room
        self.cache = slot_cache(call.model, self.model_kwargs, service, call.batch_size, capacity)
        self.verifier: Verifier | None = None
        self.ranks = Ranks.of(call.model)
        self.may_record = may_record(call, assistant)
        if self.residual and self.ranks.several:
            # The other ranks would not know what the first one has drawn from.
            raise ValueError("residual: expected False with a tensor-parallel model, got True")
        # Every rank has to compute the same bits, which methods chosen by timings need not give.
        rerouted = assistant.reroute and not self.ranks.several
        self.reroute = reroute(rerouted and call.input_ids.device.type == "cpu")
        self.copies = self._copies()
        self.decode_scope = private.OptimisedForDecode(call.model)
        self.cost_key = kind_of(call)
        # Accounts of time differ between ranks, which have to ask together.
        self.account = None if self.ranks.several else assistant.account(self.cost_key)
        self.unasked = 0  # steps since drafters were asked
        self.may_draft = True  # whether nothing has shown that drafts change the text's forwards
        self.hooks = HookWatch(call.model)
        self.taps = FeatureTaps(self.model, assistant.hidden_layers)
        self.sessions: list[AssistantSession] = []

    def run(self) -> Any:
        """The whole call; what plain `generate` returns."""
        device, synced = self.call.input_ids.device, self.call.synced_gpus
        with self.ranks, ExitStack() as opened:
            try:
                opened.enter_context(self.hooks)
                self._open_sessions(opened)
                self.ranks.begin()
                self.verifier = self.prefill()
                opened.enter_context(self.decode_scope)
                # The criteria may be met by the first token; other processes may still wait.
                while private.has_unfinished(self.model, self.finished, synced, device):
                    if self.running:
                        self.step(self.verifier)
                    else:
                        self.rest(self.verifier)
                return self.result(self.verifier)
            except BaseException:
                self.abandon()
                raise

    def step(self, verifier: Verifier) -> None:
        """Verify one tree per running row in one forward."""
        running = self.running
        with self._timed("pack"):
            self.copies.pack_due(verifier)
        self.cache.require_room(1 + max(self.cache.slots.lengths[row.index] for row in running))
        cost = self._cost(verifier)
        price = self._price(cost, verifier, len(running))
        drafting = None if self.account is None else self.account.begin(price)
        with self._timed("draft"):
            trees = self._drafts(running, verifier, price, drafting)
        self.unasked = self.unasked + 1 if drafting is not None and not drafting.uses else 0
        with self._timed("forward") as forward, self.taps, self.reroute:
            verified = self._verified(verifier, trees)
            if verified is None:
                trees = [TokenTree.empty()] * len(self.rows)
                verified = self._forward_alone(verifier)
            if self.hooks.unsure or self.hooks.changing:
                self._heed_hooks()
        self.counts.forwards += 1
        with self._timed("walk") as walked:
            paths = self._walk(trees, verified)
            if self.outputs.wants_states:
                self.outputs.step(verified, paths[0].accepted, self.cache)
        with self._timed("cache") as kept:
            verifier.keep(self.rows, verified, [path.accepted for path in paths])
        with self._timed("draft"):
            self._learn(running, trees, verified, paths, drafting)
        if self.unasked % _TIMING_PERIOD == 0 and verified.typical:
            cost.observe(verified.width, forward.seconds + walked.seconds + kept.seconds)
        if drafting is not None:
            self.assistant.settle(
                drafting,
                [self.sessions[row.index] for row in running],
                [trees[row.index] for row in running],
                [paths[row.index].tokens for row in running],
                price.share(verified.width),
            )
        if self.record is not None:
            rows = [row.index for row in running if paths[row.index].tokens]
            drafts = [session.drafts for session in self.sessions]
            self.record.step(rows, drafts, trees, paths)

    @property
    def running(self) -> list[RowText]:
        return [row for row in self.rows if not row.finished]

    @property
    def finished(self) -> bool:
        return not self.running and not self._lacks_tokens()

    def _lacks_tokens(self) -> bool:
        """Whether the rows have ended, and the cache must be given more of their text."""
        if self.verifier is None or not self.keeps_cache:
            return False
        return self.verifier.lacking(self.stopping.end(self.rows)) > 0

    @property
    def tokens(self) -> int:
        """Of the longest row."""
        return self.stopping.end(self.rows)

    @property
    def plain_step(self) -> float:
        """Seconds that a step without drafts is expected to take."""
        assert self.verifier is not None
        price = self._price(self._cost(self.verifier), self.verifier, len(self.rows))
        return price.seconds(1)

    def _timed(self, phase: str) -> Timed:
        return Timed(self.counts.seconds, phase)

    def prefill(self) -> Verifier:
        """transformers' own prefill, and the first token of every row."""
        call = self.call
        with self._timed("prefill"):
            with self.taps, self.reroute, self.copies.watching():
                outputs = private.prefill(
                    self.model, call.input_ids, call.config, self.model_kwargs
                )
            self.cache.begin(call.batch_size)
            if not self.cache.is_even:
                raise UnservableError("its layers do not keep one entry for each token of the text")
            self.model_kwargs = self._kwargs_of_steps(outputs)
            verifier = self.service.verifier(
                self.model, self.cache, self.model_kwargs, call.input_ids, self._options()
            )
            with self._timed("pack"):
                self.copies.begin(verifier, outputs.logits)
            self.own_forwards.begin(verifier, self.rows, self._max_depth)
            self.outputs.prefill(outputs, self.cache)
            last = Verified(outputs.logits[:, -1:], [0] * call.batch_size, outputs)
            paths = self._walk([TokenTree.empty()] * call.batch_size, last)
        with self._timed("draft"):
            states = self.taps.features
            for i, (session, path) in enumerate(zip(self.sessions, paths, strict=True)):
                logits = outputs.logits[i] if self.assistant.needs_logits else None
                shown = {name: found[i] for name, found in states.items()}
                session.begin(path.tokens, logits, shown)
        if self.record is not None:
            self.record.begin(paths)
        return verifier

    @property
    def _walk_needs_logits(self) -> bool:
        """Whether the walk does more with logits than choosing tokens row by row."""
        return self.outputs.wants_tokens or self.residual or self.in_step

    def _copies(self) -> Copies:
        """What may stand for the model's layers; nothing for its output layer where all of the
        logits are needed, or it is not known how tokens are chosen from them."""
        if not self.reroute.enabled:
            return Copies()
        screens = self.select.shortlist > 0 or self.select.sampling is not None
        screens &= not self._walk_needs_logits
        return Copies.of(self.model, screens, self.assistant.extra_memory)

    def _forward(self, verifier: Verifier, trees: Sequence[TokenTree]) -> Verified:
        widest = self.assistant.fixed_width or 1 + max(map(len, trees))
        self.decode_scope.want(widest == 1 or widest * len(trees) <= _FEW_TOKENS)
        return self.copies.forward(verifier, self.rows, trees)

    def _verified(self, verifier: Verifier, trees: Sequence[TokenTree]) -> Verified | None:
        """A forward over drafts; None, with nothing of it left, where it did not compute the text
        as it would have done without them."""
        if not any(map(len, trees)):
            verified = self._forward(verifier, trees)
            verified.wait()
            return verified
        try:
            verified = self._forward(verifier, trees)
            verified.wait()
            if verified.is_sound and not self.hooks.changing:
                return verified
            verifier.drop(self.rows, verified)
            why = "logits behind a draft were not finite (an overflow, or weights that are not)"
        except Exception as error:
            if self.ranks.several:
                raise
            verifier.undo()
            self.may_draft = False
            why = f"a forward over a draft raised {error!r}"
        if not self.hooks.changing:
            name = type(self.model).__name__
            logger.warning_once(f"{name}: {why}; the step was repeated without drafts")
        return None

    def _heed_hooks(self) -> None:
        """Draft no more where a hook changes forwards, which were tested without it: the next call
        is served as a test with it says."""
        if not self.hooks.learn():
            self.may_draft, self.counts.tier = False, "plain"

    def _forward_alone(self, verifier: Verifier) -> Verified:
        """The forward once more without the drafts."""
        verified = self._forward(verifier, [TokenTree.empty()] * len(self.rows))
        verified.wait()
        # Where the text itself is not finite, no draft is of use.
        self.may_draft = self.may_draft and verified.is_sound
        self.counts.forwards += 1
        verified.typical = False
        return verified

    def _options(self) -> ForwardOptions:
        """What this call wants of its forwards."""
        return ForwardOptions(
            taps=self.taps,
            top_k=self.assistant.top_k,
            capacity=self.call.prompt_length + self.room,
            keeps_cache=self.keeps_cache,
            most_tokens=self._most_tokens(),
            recorded=self.may_record,
            choose=self._choose(),
            fixed_width=self.assistant.fixed_width,
        )

    def _choose(self) -> NodeChoices | None:
        """What chooses behind all nodes at once; None where tokens need no more than logits, or
        the text besides."""
        if self.select.greedy or not self.select.blind or self._walk_needs_logits:
            return None
        return NodeChoices(self.rows, self.select, self.dice, self.assistant.fixed_width)

    def _most_tokens(self) -> int | None:
        """That a forward may feed; beyond, the kernels would not round as plain decoding does."""
        rounds = self.reroute.enabled and self.model.dtype.itemsize < 4
        return MAX_ROWS if rounds and self.call.batch_size <= MAX_ROWS else None

    def _kwargs_of_steps(self, outputs: Any) -> dict[str, Any]:
        """The forward's keyword arguments from here on; the verifier counts on from the prompt."""
        updated = private.kwargs_after(self.model, outputs, self.model_kwargs)
        return updated | {
            name: self.model_kwargs[name] for name in PER_TOKEN if name in self.model_kwargs
        }

    def _drafts(
        self,
        running: Sequence[RowText],
        verifier: Verifier,
        cost: CostModel,
        drafting: Drafting | None,
    ) -> list[TokenTree]:
        """What to verify of each row; nothing of finished ones, which bring no more tokens."""

        def plan() -> Sequence[TokenTree]:
            # Hooks that are met for the first time have to show what they do with a single token.
            if not self.may_draft or self.hooks.unsure:
                return [TokenTree.empty()] * len(running)
            extra = verifier.backlog(self.rows)
            growing = [row for row in running if row.padding is None or not self.in_step]
            sessions = [self.sessions[row.index] for row in growing]
            depths = [self._max_depth(row) for row in growing]
            proposed = self.assistant.propose(sessions, depths, cost, drafting=drafting)
            drafts = verifier.limit(proposed, growing)
            if not self.in_step:
                planned = self.assistant.plan(drafts, cost, extra, verifier.packed, drafting)
            else:
                planned = drafts_in_step(
                    running,
                    drafts,
                    lambda tree: self.assistant.plan([tree], cost, extra, drafting=drafting)[0],
                )
            return verifier.fit(planned, extra)

        trees = [TokenTree.empty()] * len(self.rows)
        planned = self.ranks.agree(plan, len(running))
        for row, tree in zip(running, planned, strict=True):
            trees[row.index] = tree
        return trees

    def _max_depth(self, row: RowText) -> int | None:
        remaining = self.stopping.remaining(row)
        # The last token that may be generated needs no node: the walk draws it at its parent.
        return None if remaining is None else max(0, remaining - 1)

    def _walk(self, trees: Sequence[TokenTree], verified: Verified) -> list[Path]:
        drawn = [session.draw_at for session in self.sessions] if self.residual else None
        return self.walk(trees, verified, drawn)

    def _learn(
        self,
        running: Sequence[RowText],
        trees: Sequence[TokenTree],
        verified: Verified,
        paths: Sequence[Path],
        drafting: Drafting | None,
    ) -> None:
        """Count the step and tell the drafters what it showed."""
        grown = [row for row in running if paths[row.index].tokens]
        for row in grown:
            path = paths[row.index]
            self.counts.count_step(len(trees[row.index]), len(path.tokens) - 1)
        feedbacks: Sequence[RowFeedback | None] = [None] * len(grown)
        if self.assistant.needs_feedback and (self.unasked == 0 or self.assistant.hidden_layers):
            needs_all = self.assistant.needs_all_logits
            feedbacks = row_feedbacks(grown, trees, paths, verified, self.taps, needs_all)
        self.assistant.commit(
            [self.sessions[row.index] for row in grown],
            [paths[row.index].tokens for row in grown],
            feedbacks,
            drafting,
        )

    def _cost(self, verifier: Verifier) -> CostModel:
        """The measured t(n) of forwards like the next one."""
        key, bucket = self.cost_key, size_bucket(self.cache.slots.longest)
        like = bucket, verifier.packed, verifier.manner
        if like != (key.cache_length, key.packed, key.manner):
            self.cost_key = replace(
                key, cache_length=bucket, packed=verifier.packed, manner=verifier.manner
            )
        return self.assistant.costs.get(self.cost_key)

    def _price(self, cost: CostModel, verifier: Verifier, rows: int) -> CostModel:
        """t(n) as the tokens of one running row see it, the other rows being fed beside it."""
        if not verifier.packed:
            return stepped(cost, verifier.widths)
        return PackedCost(cost, rows, alike=self.in_step)

    def rest(self, verifier: Verifier) -> None:
        """A forward after the rows have ended: it feeds what the cache still lacks of them, or
        nothing, because other processes still wait in their own forwards."""
        self.decode_scope.want(False)
        if self._lacks_tokens():
            with self._timed("cache"), self.taps, self.reroute:
                verifier.catch_up(self.rows, self.stopping.end(self.rows))
            return
        with self.taps:
            nothing = verifier.forward(self.rows, [TokenTree.empty()] * len(self.rows))
        verifier.keep(self.rows, nothing, [[] for _ in self.rows])

    def result(self, verifier: Verifier) -> Any:
        """What plain `generate` returns."""
        end = self.stopping.end(self.rows)
        # What was recorded has taken the experts' own method for granted.
        self.decode_scope.want(False)
        verifier.finish(end)
        self.counts.attention = verifier.attention_by
        self.counts.repeated, self.counts.recordings = verifier.repeated, verifier.recordings
        self.cache.hand_back()
        if self.record is not None:
            self.record.finish(end)
        for row in self.rows:
            # What a row generated while it waited for others.
            row.cut(end)
        self.counts.tokens = sum(
            len(row.generated) if row.padding is None else min(row.met or end, end)
            for row in self.rows
        )
        self.dice.settle(end)
        self.counts.keeps_seed = self.dice.plain and not self.residual
        if self.call.streamer is not None:
            self.call.streamer.end()
        new = torch.tensor(
            [row.fed(0, end) for row in self.rows],
            dtype=torch.long,
            device=self.call.input_ids.device,
        )
        return self.outputs.result(
            torch.cat([self.call.input_ids, new], dim=1),
            self._returned_cache(),
            self.model_kwargs.get("encoder_outputs"),
            end,
        )

    def abandon(self) -> None:
        """Leave a cache that somebody else holds as plain decoding can go on from it."""
        if self.verifier is not None:
            self.verifier.abandon()
            self.cache.hand_back()
        else:
            self.cache.abandon()

    def _returned_cache(self) -> Any:
        """The cache that the result names: where the call was given one, that one."""
        if self.cache.lender is not None:
            return self.cache.lender
        return self.model_kwargs.get(self.service.cache_name)

    def _room(self) -> int:
        """Generated tokens per row that buffers are made for."""
        limit = self.stopping.max_length
        # They double when a call has no limit or a far one.
        return 256 if limit is None else min(max(1, limit - self.call.input_ids.shape[1]), 4096)

    def _texts(self) -> list[RowText]:
        pad = private.pad_token(self.call.config) if self.stopping.has_eos else None
        pad_id = None if pad is None else int(pad)
        return [RowText(i, ids, self.room, pad_id) for i, ids in enumerate(self.call.input_ids)]

    def _open_sessions(self, opened: ExitStack) -> None:
        """Start a draft session for every row, all of which are closed, whatever happens."""
        call = self.call
        for row, prompt_ids in enumerate(call.prompts):
            foresight = RowForesight(self.select, self.dice, self.rows[row])
            target = replace(
                call.target, foresight=foresight, own=self.own_forwards, graphs=self.may_record
            )
            session = self.assistant.start(prompt_ids, target, row, call.batch_size)
            opened.callback(self._close, session)
            self.sessions.append(session)

    def _close(self, session: AssistantSession) -> None:
        self.counts.count_expected(session.expected.accepted, session.expected.rejected)
        session.close()


def may_record(call: Call, assistant: DraftingPolicy) -> bool:
    """Whether forwards on an accelerator may be repeated from recordings."""
    return assistant.graphs and not call.synced_gpus and not Ranks.of(call.model).several


def kind_of(call: Call) -> CostKey:
    """The calls that have one account with this one: what plain decoding would run tells them."""
    key = cost_key(call.model, call.input_ids)
    return replace(key, manner="compiled") if call.compiles_plainly else key


def cost_key(model: Any, input_ids: torch.Tensor, cache_length: int = 0) -> CostKey:
    """What t(n) of a call with these inputs depends on, int64 [batch, length]."""
    return CostKey(
        fingerprint=fingerprint(model),
        device=str(input_ids.device),
        dtype=str(model.dtype),
        attention=str(private.attention_of(model.config)),
        batch_size=size_bucket(len(input_ids)),
        cache_length=size_bucket(cache_length),
    )
