"""transformers' continuous batching, with several tokens of a decoding request in one step.

The scheduler, the blocks, prefix sharing and chunked prefill stay transformers' own. A manager of
ours makes what serves its requests of subclasses, which are the only places that spell names of
transformers' that are not public. A decoding request is fed its last token and a draft behind it;
the step reads the logits of all of these places, chooses a token at each, keeps the ones that plain
decoding would have chosen, and takes the rest back before the next step. A request that cannot be
served fails alone, and a step that fails with drafts is computed again without them.
"""

from __future__ import annotations

import math
import queue
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler

from ...host.positions import position_limit
from ...system.log import get_logger
from .paged import PagedStep

if TYPE_CHECKING:
    from .drafts import RequestDrafts

logger = get_logger(__name__)

Ours = TypeVar("Ours")

_LONGEST = 4096  # tokens of a draft where nothing else bounds it

# The assistant of what the running thread, or task, adds.
_assistant: ContextVar[Any] = ContextVar("assistant of a request", default=None)


def _taken_over(kind: type[Ours], theirs: Any, **own: Any) -> Ours:
    """An object of a class of ours in the place of one that transformers, which names its classes
    itself, has made: what that one holds, and more."""
    ours = kind.__new__(kind)
    vars(ours).update(vars(theirs), **own)
    return ours


class DraftedRequest(RequestState):
    """A request that knows its assistant, which its forks and what is made of it anew keep.

    Attributes:
        assistant: `private()` or `expecting(text)` of the manager's; None: the manager's own.
        text: what drafts for it; None before anything does.
        checked: whether it is known that it can be served.
        draft: what a step may feed behind the last token, and feeds where it is scheduled.
        place: of the logits behind the last fed token; those behind its draft follow.
        kept: tokens that its text got by the last step.
    """

    assistant: Any = None
    text: Any = None
    checked: bool = False
    draft: Sequence[int] = ()
    place: int = 0
    kept: int = 0

    def create_equivalent_initial_request(self) -> RequestState:
        state = super().create_equivalent_initial_request()
        text, self.text = self.text, None
        own = {"assistant": self.assistant, "checked": True, "text": text}
        return _taken_over(DraftedRequest, state, **own)

    @property
    def left(self) -> float:
        """Tokens that may still be generated."""
        return self._new_tokens_limit - self.generated_len()


class _Requests(queue.Queue[Any]):
    """A manager's queue, whose requests know their assistants."""

    def put(self, item: Any, *args: Any, **options: Any) -> None:
        item = _taken_over(DraftedRequest, item, assistant=_assistant.get())
        super().put(item, *args, **options)


@contextmanager
def adding_for(assistant: Any) -> Iterator[None]:
    """A scope in which requests are added for `private()` or `expecting(text)` of the manager's
    assistant; None: for its own."""
    token = _assistant.set(assistant)
    try:
        yield
    finally:
        _assistant.reset(token)


def drafting(manager: Any, drafts: RequestDrafts | None) -> Any:
    """A manager that has not started, as one whose steps carry drafts; None: none.

    A model may keep its manager from one call to the next.
    """
    if isinstance(manager, DraftingManager):
        manager.drafts = drafts
        if drafts is None and isinstance(manager.batch_processor, DraftingProcessor):
            manager.batch_processor = None
        return manager
    if drafts is None:
        return manager
    requests = _taken_over(_Requests, manager.input_queue)
    ours = _taken_over(DraftingManager, manager, drafts=drafts, input_queue=requests)
    model = manager.model
    if getattr(model, "_cached_continuous_batching_manager", None) is manager:
        model._cached_continuous_batching_manager = ours
    return ours


class DraftingManager(ContinuousBatchingManager):
    """A manager whose steps carry drafts, where there are any."""

    drafts: RequestDrafts | None

    def add_request(self, *args: Any, assistant: Any = None, **options: Any) -> str | None:
        """transformers' own, with an assistant for this request alone.

        Args:
            assistant: `private()` or `expecting(text)` of the manager's; None: the manager's.

        Raises:
            ValueError: another assistant.
        """
        assistant = _assistant.get() if assistant is None else assistant
        if assistant is not None:
            if self.drafts is None:
                raise ValueError("assistant: expected none where the manager has none itself")
            self.drafts.check_twin(assistant)
        with adding_for(assistant):
            return super().add_request(*args, **options)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        if self.drafts is None:
            return processor
        if isinstance(processor, DraftingProcessor):
            processor.scheduler.drafts = self.drafts
            return processor
        if (why := _why_not(processor)) is not None:
            name = type(self.model).__name__
            logger.warning("%s: continuous batching without the assistant (%s)", name, why)
            return processor
        kind: Any = type(processor.scheduler)
        scheduler = _taken_over(
            _drafting(kind),
            processor.scheduler,
            drafts=self.drafts,
            vocab_size=len(self.model.get_input_embeddings().weight),
            most_tokens=_most_tokens(processor.cache, position_limit(self.model)),
        )
        processor.offloading_manager.scheduler = scheduler
        runner = _taken_over(_DraftingRunner, processor.model_runner, scheduler=scheduler)
        ours = _taken_over(DraftingProcessor, processor, scheduler=scheduler, model_runner=runner)
        runner.paged = PagedStep(ours.cache, ours._restore_all)
        return ours


def _why_not(processor: ContinuousBatchProcessor) -> str | None:
    """What in a manager's configuration leaves no room for drafts; None: nothing."""
    if processor.use_async_batching:
        return (
            "its steps are prepared before the last one has ended; "
            "ContinuousBatchingConfig(use_async_batching=False) lets it draft"
        )
    if processor.model_runner.pad_inputs:
        return (
            "its forwards are recorded or compiled for one token of each request; "
            "ContinuousBatchingConfig(use_cuda_graph=False) without compile configurations lets "
            "it draft"
        )
    if processor.distributed_helper.tp_size > 1:
        return "several ranks would have to draft alike"
    for found in processor.logit_processor.logits_processor:
        known = isinstance(found, ContinuousBatchingLogitsProcessor)
        if not known and not getattr(found, "supports_continuous_batching", False):
            return f"{type(found).__name__} may count the tokens that it is shown"
    return None


def _most_tokens(cache: Any, positions: int) -> int:
    """The most tokens of a request that an empty cache holds, at most as many as positions."""
    nobody = RequestState(request_id="", initial_tokens=[])
    if cache.read_cache_limit is None:
        positions = min(positions, cache.max_tokens_read)
    return bisect_left(
        range(positions),
        True,
        key=lambda n: not cache.can_store_request_tokens(nobody, n + 1, dry_run=True),
    )


@cache
def _drafting(scheduler: Any) -> Any:
    """A scheduler's class whose decoding requests bring drafts."""
    return type(f"Drafting{scheduler.__name__}", (_DraftingScheduler, scheduler), {})


class _DraftingScheduler(Scheduler):
    """Schedules a decoding request with a draft behind its last token, where there is room.

    Attributes:
        vocab_size: ids that the model can be fed.
        most_tokens: of one request.
        proposes: whether drafts are still to be proposed for this step.
    """

    drafts: RequestDrafts
    vocab_size: int
    most_tokens: int
    proposes = False

    def add_waiting_request(self, state: DraftedRequest) -> None:
        if not state.checked:
            self._check(state)
            self.drafts.end_repeats()  # the model may have changed, as between two calls
            self.proposes = False  # nobody knows yet how wide a step may be
        super().add_waiting_request(state)

    def _check(self, state: RequestState) -> None:
        """ValueError for a request that would end the loop, and with it all other requests."""
        name, wanted, ids = state.request_id, state.max_new_tokens, np.asarray(state.initial_tokens)
        if name in self.active_requests or name in self.waiting_requests:
            raise ValueError(f"request_id: expected one that no running request has, got {name!r}")
        if not 0 < len(ids) <= self.most_tokens:
            raise ValueError(
                f"input_ids: expected 1 to {self.most_tokens} tokens, as many as the cache holds "
                f"and the model has positions for, got {len(ids)}"
            )
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"input_ids: expected integers, got {ids.ndim}-d {ids.dtype}")
        least, most, last = ids.min(), ids.max(), self.vocab_size - 1
        if not 0 <= least <= most <= last:
            raise ValueError(f"input_ids: expected ids from 0 to {last}, got {least} to {most}")
        if not isinstance(wanted, (int, float, type(None))):
            raise ValueError(f"max_new_tokens: expected a number, got {wanted!r}")

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        if self.proposes:
            self.proposes = False
            active = self.active_requests.values()
            going = [s for s in active if s.status == RequestStatus.DECODING and s.generated_len()]
            # A sliding window keeps no more than its size of what is fed at once, and what is
            # accepted has to stay.
            sizes = (window.sliding_window - 1 for window in _windows(self.cache))
            most = min(sizes, default=_LONGEST)
            # Nothing is drafted behind the last token that may be generated.
            longest = [
                math.ceil(min(most, state.left - 1, self.most_tokens - state.position_offset - 1))
                for state in going
            ]
            fed = self._fed(token_budget)
            drafts = self.drafts.propose(going, longest, fed, max(0, token_budget - fed))
            for state, draft in zip(going, drafts, strict=True):
                state.draft = draft
        return super().schedule_batch(token_budget, cache_budget)

    def _fed(self, token_budget: int) -> int:
        """Tokens of a step that decoding needs, or prompts that can be begun."""
        active = self.active_requests.values()
        needed = sum(1 + len(state.remaining_prefill_tokens) for state in active)
        waiting = () if self.block_new_requests else self.waiting_requests_order
        begun = 0
        for request_id in islice(waiting, max(0, self.max_requests_per_batch - len(active))):
            state = self.waiting_requests[request_id]
            prompts = begun + len(state.remaining_prefill_tokens)
            stored = self.cache.can_store_request_tokens(state, prompts, dry_run=True)
            if not stored or needed + begun >= token_budget:
                break
            begun = prompts
        return needed + begun

    def _infer_request_tokens(self, state: DraftedRequest, removed: set[str]) -> list[int]:
        tokens: list[int] = super()._infer_request_tokens(state, removed)
        if state.draft:
            # A draft is worth no other request's blocks: each may need one more.
            page = max(found.tokens_per_page for found in self.cache.cache_allocators.values())
            length = page * len(self.active_requests) + 1 + len(state.draft)
            fits = self.cache.can_store_request_tokens(state, length, dry_run=True)
            if state.status != RequestStatus.DECODING or not fits:
                state.draft = ()
        return [*tokens, *state.draft]

    def _schedule_request(
        self, state: DraftedRequest, tokens: list[int], token_budget: int, removed: set[str]
    ) -> None:
        if not state.draft:
            super()._schedule_request(state, tokens, token_budget, removed)
            return
        # What does not fit is left out; the rest of a prompt would be fed later instead.
        state.tokens_to_process = tokens[:token_budget]
        state.draft = tokens[1:token_budget]


class _DraftingRunner(ModelRunner):
    """Reads the logits [places, vocab_size] behind drafted tokens too, and shows them."""

    scores: torch.Tensor
    scheduler: Any
    paged: PagedStep

    def maybe_pad_inputs(self, tokens: int, slots: int, by_blocks: bool) -> tuple[int, int]:
        tokens, slots = super().maybe_pad_inputs(tokens, slots, by_blocks)
        texts = len(self.scheduler.active_requests)
        return self.scheduler.drafts.fill(self.paged, tokens, texts), slots

    def compute_batch(self, model: torch.nn.Module, batch_data: dict[str, Any]) -> None:
        requests = self.inputs_and_outputs.requests_in_batch
        if _drafted(requests):
            # The fed tokens whose logits are read, and whose request each one is of, counted among
            # the requests that generate.
            ends = accumulate(future.query_length for future in requests)
            spans = [
                range(end - 1 - len(future.state.draft), end)
                for future, end in zip(requests, ends, strict=True)
                if future.has_new_token
            ]
            places = [place for span in spans for place in span]
            owners = [owner for owner, span in enumerate(spans) for _ in span]
            arguments = batch_data["logits_processor_args"]
            batch_data["logits_processor_args"] = arguments[:, owners]
            batch_data["logits_indices"] = batch_data["logits_indices"].new_tensor(places)
        self.supports_logits_to_keep(model)  # which is asked of the model alone
        super().compute_batch(self.paged if self.paged.forward is not None else model, batch_data)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        self.scores = scores[0]
        # One token whose states overflow makes NaN of whole rows, and of others' under a mask.
        # Logits that are no numbers end the step before tokens are drawn from them.
        drafted = _drafted(self.inputs_and_outputs.requests_in_batch)
        if drafted and bool(self.scores[:, 0].isnan().any()):
            raise FloatingPointError("logits that are no numbers")
        super()._sample(scores, output_ids)


class DraftingProcessor(ContinuousBatchProcessor):
    """Reads the logits of drafted places, and keeps what plain decoding would have generated.

    Greedily a place's token is its best one; where tokens are drawn, each place draws its own from
    the distribution behind the draft so far, so what is kept has plain decoding's distribution.
    """

    def prepare_next_batch(self) -> bool:
        scheduler = self.scheduler
        scheduler.proposes = True
        scheduler.drafts.begin_step()
        for state in [*scheduler.active_requests.values()]:
            state.draft = ()
            if state.position_offset >= scheduler.most_tokens:
                error = ValueError(
                    f"expected at most {scheduler.most_tokens} tokens of prompt and output, as "
                    "many as the cache holds and the model has positions for"
                )
                self._handle_request_error(error, state)
                scheduler.finish_request(state.request_id)
        if not scheduler.active_requests:  # the last one was cancelled, or failed
            scheduler.block_new_requests = False
        ready = super().prepare_next_batch()
        running = chain(scheduler.active_requests.values(), scheduler.waiting_requests.values())
        scheduler.drafts.close_others([*running])
        return ready

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        # The tokens are this request's; transformers looks them up by the id, which another
        # request may have.
        self.output_router.fail_and_deliver(state, error)

    def _generation_step(self, model: torch.nn.Module) -> None:
        drafts, requests = self.scheduler.drafts, self.inputs_and_outputs.requests_in_batch
        self._remember()
        try:
            with drafts.scope(len(requests)):
                super()._generation_step(model)
        except Exception as error:
            drafts.blame(_drafted(requests), error)
            self._restore_all()
            self._drop()
            super()._generation_step(model)

    def _remember(self) -> None:
        """Copy what the step overwrites of sliding windows, and what is read again.

        A window's slots go round: a token lies where an earlier one lies that is still seen, should
        the token be a draft and rejected, or the step computed again.
        """
        self._overwritten: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        for allocator in _windows(self.cache):
            for future in self.inputs_and_outputs.requests_in_batch:
                state, count = future.state, future.query_length - 1
                if count and state.position_offset > allocator.sliding_window:
                    first = state.position_offset - count
                    slots = allocator.get_write_indices(state.request_id, first, count)
                    kept = self._overwritten.setdefault(state.request_id, [])
                    for view in chain(*allocator._kv_token_views.values()):
                        places = torch.tensor(slots, device=view.device)
                        kept.append((view, places, view[places]))

    def _restore(self, state: DraftedRequest, count: int) -> None:
        """Write back what lay in windows where the last `count` fed tokens of a request lie."""
        for view, slots, states in self._overwritten.get(state.request_id, ()) if count else ():
            view[slots[-count:]] = states[-count:]

    def _restore_all(self) -> None:
        """Write back what the step has overwritten of windows."""
        for future in self.inputs_and_outputs.requests_in_batch:
            self._restore(future.state, future.query_length - 1)

    def _drop(self) -> None:
        """Prepare a step again without its drafts, nor filler."""
        self.model_runner.paged.forward = None
        io = self.inputs_and_outputs
        for future in io.requests_in_batch:
            state, count = future.state, len(future.state.draft)
            state.position_offset -= future.query_length
            future.query_length -= count
            text = state.initial_tokens + state.generated_tokens
            end = state.position_offset + future.query_length
            state.tokens_to_process, state.draft = text[state.position_offset : end], ()
            if count:
                future.complete_blocks = self.cache.count_new_complete_blocks(state, 1)
                self._clear(state, count)
        io.prepare_batch_tensors(
            requests_in_batch=io.requests_in_batch,
            logits_processors=self.logit_processor,
            use_decode_fast_path=False,
            num_q_tokens=sum(future.query_length for future in io.requests_in_batch),
            max_kv_read=io.max_kv_read,
            use_padding=False,
        )

    def _clear(self, state: RequestState, count: int) -> None:
        """Leave nothing of rejected nodes whose states are no numbers: a mask does not hide NaN."""
        for allocator in self.cache.cache_allocators.values():
            if allocator.layer_type != SLIDING_ATTENTION:
                first = state.position_offset + 1
                slots = allocator.get_write_indices(state.request_id, first, count)
                for view in chain(*allocator._kv_token_views.values()):
                    view[slots] = 0

    def update_batch(self) -> None:
        io, drafts = self.inputs_and_outputs, self.scheduler.drafts
        generating = [future for future in io.requests_in_batch if future.has_new_token]
        places = sum(1 + len(future.state.draft) for future in generating)
        chosen = io.output_ids[:, :places].clone()
        tokens = chosen[0].tolist()
        logprobs = chosen[1].view(torch.float32).tolist() if self.return_logprobs else None
        place = 0
        for row, future in enumerate(generating):
            state, fed = future.state, 1 + len(future.state.draft)
            kept = _kept(state, tokens[place : place + fed])
            if state.draft:
                self._undo(future, fed - len(kept), len(kept))
            for number, token in enumerate(kept[:-1], place):
                state.update_and_check_completion(token, logprobs and logprobs[number])
                if state.streaming:
                    self.output_router.deliver(state.to_generation_output())
            io.output_ids[:, row] = chosen[:, place + len(kept) - 1]
            state.place, state.kept = place, len(kept)
            place += fed
        fed = sum(future.query_length for future in io.requests_in_batch)
        super().update_batch()
        grown = [future.state for future in generating]
        drafts.follow(grown, self.model_runner.scores)
        del self.model_runner.scores
        drafts.end_step(grown, fed == places)

    def _undo(self, future: Any, rejected: int, kept: int) -> None:
        """Undo the feeding of the last tokens of a request; `kept` stay."""
        state = future.state
        state.position_offset -= rejected + kept
        future.complete_blocks = self.cache.count_new_complete_blocks(state, kept)
        state.position_offset += kept
        self._restore(state, rejected)

    def fail_all_requests(self, error: Exception) -> None:
        super().fail_all_requests(error)
        self.scheduler.drafts.close_others([])


def _drafted(requests: Sequence[Any]) -> list[DraftedRequest]:
    """The requests of a step that bring drafts."""
    return [future.state for future in requests if future.state.draft]


def _windows(cache: Any) -> list[Any]:
    """What holds the keys and values of layers with a sliding window."""
    kinds = cache.cache_allocators.values()
    return [kind for kind in kinds if kind.layer_type == SLIDING_ATTENTION]


def _kept(state: DraftedRequest, chosen: list[int]) -> list[int]:
    """What plain decoding would have generated, given the token chosen behind each fed one."""
    for count, (drafted, token) in enumerate(zip(state.draft, chosen, strict=False), 1):
        if token in state._eos_token_ids or count >= state.left or token != drafted:
            return chosen[:count]
    return chosen
