"""Drafts for vLLM, whose `speculative_config` names this class as its "model".

vLLM verifies one chain per request, packs all requests into one forward, and chooses the tokens;
what is here drafts. Importing it takes nothing of vLLM, and nothing of transformers.
"""

from __future__ import annotations

import atexit
import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...corpus.datastore import Datastore
from ...drafters.base import Drafter, Target
from ...drafters.rest import RestDrafter
from ...drafters.suffix import SuffixDrafter
from ...host.fingerprint import config_fingerprint
from ...memory.output_memory import OutputMemory
from ...policy.cost_model import CostModel, CostView
from ...policy.cost_store import CostKey, size_bucket
from ...policy.policy import Ask, AssistantSession, DraftingPolicy, Outcome
from ...policy.stats import CallStats
from ...policy.step import DraftedStep
from ...types.token_tree import Limits

logger = logging.getLogger(__name__)

_WELL_KNOWN = 64  # timings after which only every third step teaches t(n): learning has its price
_COMPARED = 1024  # tokens at the ends of texts that tell apart two requests of one length
_TIMED = 3  # steps, one of which is timed


class Proposer:
    """What vLLM (0.22 and later, V1) asks for drafts.

    `num_speculative_tokens` bounds a draft. Who drafts, and how much of it is worth verifying, is
    decided in every step for all requests together, from calibrated probabilities and the measured
    time of steps. A request that vanishes, at its end or to be resumed later, has taught what it
    brought.

    Options are read from `additional_config={"hf_retrieval_assist": {...}}`:

    * `memory`: a file that keeps outputs, or the URL of a server that shares them;
    * `max_bytes`: bound on the memory of outputs;
    * `datastore`: directory of a corpus to draft from as well;
    * `min_prob`: no token is drafted that is estimated to be less probable;
    * `budget`: "auto", or that many tokens of each draft, whatever they cost.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Attributes:
        policy: the drafters, their calibration, and `stats`.

    Raises:
        ValueError: an unknown option, or one out of range.
    """

    def __init__(self, vllm_config: Any) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.longest_draft = int(vllm_config.speculative_config.num_speculative_tokens)
        self.longest_text = int(model.max_model_len)
        options = (vllm_config.additional_config or {}).get("hf_retrieval_assist", {})
        self.policy = make_policy(self.longest_draft, **_checked(options))
        self.target = Target(
            vocab_size=model.get_vocab_size(), fingerprint=config_fingerprint(model.hf_config)
        )
        self.eos_ids = _eos_ids(model)
        # The first process of a tensor-parallel group drafts for all.
        self.leads = parallel.rank % parallel.tensor_parallel_size == 0
        self.device_type = vllm_config.device_config.device_type
        self.cost = CostModel()
        self._rows: list[Row] = []
        self._step: DraftedStep | None = None  # that is being verified
        self._last: float | None = None  # when the step before arrived
        self._timings = 0
        atexit.register(self.close)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each request of the batch.

        Args:
            sampled_token_ids: what the step added to each; nothing where it fed a part of a prompt.
            num_tokens_no_spec: int32 [requests], tokens of each, these included.
            token_ids_cpu: int32 [requests, longest], the tokens.
            slot_mappings: not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self.leads:
            return drafts
        arrived = time.perf_counter()
        lengths = num_tokens_no_spec[: len(drafts)].tolist()
        grown = self._follow(sampled_token_ids, lengths, token_ids_cpu, arrived)
        rooms = {row: room for row in grown if (room := self._room(row)) > 0}
        self._step = self._draft(rooms) if rooms else None
        for row, tree in zip(rooms, self._step.trees if self._step else (), strict=True):
            row.drafted = len(tree)
            drafts[grown[row]] = tree.token_ids.tolist()
        self._last = arrived
        return drafts

    def _draft(self, rooms: Mapping[Row, int]) -> DraftedStep:
        """A chain for each request, of at most so many tokens; together as long as pays."""
        sessions, rows = [row.session for row in rooms], len(rooms)
        key = CostKey(self.target.fingerprint, self.device_type, "", "vllm", size_bucket(rows))
        price, account = CostView(self.cost, rows=rows), self.policy.account(key)
        limits = partial(Limits, [*rooms.values()], chains=True, packed=True)
        return self.policy.draft(Ask(sessions, price, account, self.longest_draft, limits))

    def _room(self, row: Row) -> int:
        """How many tokens may be drafted for a request; none may follow where it is not above 0."""
        return 0 if row.ended else min(self.longest_draft, self.longest_text - row.length - 1)

    def _follow(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: Sequence[int],
        token_ids: NDArray[np.int32],
        arrived: float,
    ) -> dict[Row, int]:
        """Learn what the step brought; the rows that it brought tokens, with their places."""
        known: dict[int, list[Row]] = {}
        for running in self._rows:
            known.setdefault(running.length, []).append(running)
        grown: dict[Row, int] = {}
        outcomes: list[Outcome] = []
        step = self._step
        verified = dict(zip(step.sessions, step.trees, strict=True)) if step else {}
        self._rows = []
        fed = decoding = 0
        for place, (new, length) in enumerate(zip(sampled, lengths, strict=True)):
            before = token_ids[place, : length - len(new)]
            row = _taken(known, before)
            if row is not None:
                fed += 1 + row.drafted
            elif len(new):
                session = self.policy.start(np.array(before), self.target)
                row = Row(session, self.eos_ids, before)
            else:
                continue
            self._rows.append(row)
            if len(new):
                tree = verified.get(row.session)
                outcomes.append(Outcome(row.session, row.extend(new), tree))
                grown[row] = place
                decoding += row.counts.steps > 0
        if outcomes:
            width = 1 + sum(len(outcome.tree or ()) for outcome in outcomes)
            self.policy.learn(step, outcomes, width)
        if len(sampled) == decoding:
            self._time(fed, arrived)
        for gone in chain.from_iterable(known.values()):
            gone.close()
        return grown

    def _time(self, fed: int, arrived: float) -> None:
        """Learn t(n) from a step that fed no part of a prompt, unless there was none before it."""
        if fed and self._last is not None:
            self._timings += 1
            if self._timings <= _WELL_KNOWN or self._timings % _TIMED == 0:
                self.cost.observe(fed, arrived - self._last)

    def close(self) -> None:
        """All requests have ended. Called at the end of the process; more may follow."""
        for row in self._rows:
            row.close()
        self._rows = []
        if self.policy.stats.total.calls:
            logger.info("%s", self.policy.stats.total)


class Row:
    """A request, which vLLM names by nothing but its tokens.

    Attributes:
        length: its tokens, prompt included.
        drafted: tokens of its draft that is being verified.
        session: that drafts for it.
        counts: of the steps since the one that ended its prompt.
        ended: whether its last token ends the text.
    """

    __slots__ = "_eos_ids", "_held", "_text", "counts", "drafted", "ended", "length", "session"

    def __init__(
        self, session: AssistantSession, eos_ids: frozenset[int], prompt: NDArray[np.int32]
    ) -> None:
        self.session = session
        self.length = len(prompt)
        self.drafted = 0
        self.counts = CallStats("vllm", calls=1)
        self.ended = False
        self._eos_ids = eos_ids
        self._text = bytearray(prompt)
        # Tokens behind the end of the text, which belong to it only if it goes on.
        self._held: list[int] = []

    def has(self, text: NDArray[np.int32], tokens: int) -> bool:
        """Whether this request's text ends as `text`, int32 [length], does by so many tokens."""
        return self._text[-4 * tokens :] == text[-tokens:].data

    def extend(self, new: Sequence[int]) -> list[int]:
        """Append what a step brought, at least one token; the tokens to be learnt."""
        tokens = array("i", new)
        self._text += tokens
        self.length += len(tokens)
        if self.counts.tokens:
            self.counts.count_steps(1, self.drafted, len(tokens) - 1)
            self.counts.forwards += 1
            self.counts.saved_forwards += len(tokens) - 1
        self.counts.tokens += len(tokens)
        self.drafted = 0
        first, ids = len(self._held), self._held + tokens.tolist()
        self.ended = not self._eos_ids.isdisjoint(tokens)
        end = len(ids)
        if self.ended:
            end = next(i + 1 for i in range(first, end) if ids[i] in self._eos_ids)
        self._held = ids[end:]
        return ids[:end]

    def close(self) -> None:
        """The request has ended, or is to be started again."""
        self.session.close()
        self.session.policy.count(self.counts)


def _taken(known: dict[int, list[Row]], text: NDArray[np.int32]) -> Row | None:
    """The request with this text, int32 [n], taken from those of its length; None: none has it.

    A request alone of its length is known by its end, so that a step takes no longer behind longer
    prompts. Where one ends as another with that end begins, drafts are worse, and no token is.
    """
    same = known.get(len(text), [])
    compared = _COMPARED if len(same) == 1 else len(text)
    for row in same:
        if row.has(text, compared):
            same.remove(row)
            return row
    return None


def make_policy(
    longest_draft: int,
    memory: str | None = None,
    max_bytes: int = 256 << 20,
    datastore: str | None = None,
    min_prob: float = 0.02,
    budget: Any = "auto",
) -> DraftingPolicy:
    """What drafts chains; for the options see :class:`Proposer`."""
    place = "url" if memory is not None and "://" in memory else "path"
    outputs = OutputMemory(max_bytes, **{place: memory})  # type: ignore[arg-type]
    drafters: list[Drafter] = [SuffixDrafter(outputs, min_prob=min_prob, tree=False)]
    if datastore is not None:
        corpus = Datastore.open(datastore)
        drafters.append(RestDrafter(corpus, max_nodes=longest_draft, continuation=longest_draft))
    return DraftingPolicy(drafters, budget=budget, max_nodes=longest_draft)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    known = ("memory", "max_bytes", "datastore", "min_prob", "budget")
    for name in options:
        if name not in known:
            raise ValueError(f"hf_retrieval_assist: expected options {known}, got {name!r}")
    return dict(options)


def _eos_ids(model: Any) -> frozenset[int]:
    """The ids that end a text, by the model's configuration and by its generation's."""
    given = (
        getattr(model.hf_text_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
    )
    lists = (ids if isinstance(ids, list) else [ids] for ids in given)
    return frozenset(token for ids in lists for token in ids if token is not None)
