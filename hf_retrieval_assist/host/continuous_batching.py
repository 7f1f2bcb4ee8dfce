"""transformers' continuous batching, with several tokens of a decoding request in one step.

The scheduler, the blocks, prefix sharing and chunked prefill stay transformers' own. Three of its
classes get a subclass here, which are the only places that spell names of theirs that are not
public. A decoding request is fed its last token and a draft behind it; the step reads the logits of
all of these places, chooses a token at each, keeps the ones that plain decoding would have chosen,
and takes the rest back before the next step.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from transformers.generation.continuous_batching import cache_allocators
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

from ..system.log import get_logger

logger = get_logger(__name__)

_LONGEST = 4096  # tokens of a draft where nothing else bounds it


class FedRequest(NamedTuple):
    """A decoding request, and what a step made of it.

    Attributes:
        draft: the tokens that were fed behind the last one of its text.
        kept: tokens that its text got.
        place: of the logits behind its last token; those behind the draft follow.
    """

    state: RequestState
    draft: Sequence[int]
    kept: int
    place: int


class Drafts(Protocol):
    """Where the drafts of requests come from."""

    def assign(self, request_id: str, assistant: Any) -> None:
        """A request that has not begun drafts by an assistant of its own."""

    def propose(
        self, requests: Sequence[RequestState], room: int, longest: int
    ) -> dict[str, list[int]]:
        """Tokens behind each request's text: `longest` of each at most, and `room` in all."""

    def scope(self) -> AbstractContextManager[Any]:
        """In which the forwards of steps run."""

    def follow(self, fed: Sequence[FedRequest], logits: torch.Tensor) -> None:
        """The texts of these requests have grown; `logits` [places, vocab_size] are processed."""

    def keep(self, request_ids: set[str]) -> None:
        """Only these requests go on."""

    def time(self, tokens: int, seconds: float) -> None:
        """A step that fed nothing but these tokens of decoding requests took so long."""


def serve(manager: ContinuousBatchingManager, drafts: Drafts) -> None:
    """Let a manager that has not started draft."""
    manager.__class__ = DraftingManager
    manager.drafts = drafts
    processor = getattr(manager, "batch_processor", None)
    if isinstance(processor, DraftingProcessor):
        processor.drafts = processor.scheduler.drafts = drafts


class DraftingManager(ContinuousBatchingManager):
    """A manager whose steps carry drafts."""

    drafts: Drafts

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        *args: Any,
        assistant: Any = None,
        **options: Any,
    ) -> str | None:
        """transformers' own, with an assistant for this request alone.

        Args:
            assistant: `private()` or `expecting(text)` of the manager's; None: the manager's.

        Raises:
            ValueError: another assistant.
        """
        if assistant is not None:
            request_id = request_id or f"req_of_its_own_{uuid.uuid4()}"
            self.drafts.assign(request_id, assistant)
        return super().add_request(input_ids, request_id, *args, **options)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        if isinstance(processor, DraftingProcessor):
            return processor
        if (why := _why_not(processor)) is not None:
            logger.warning(
                "%s: continuous batching without the assistant (%s)",
                type(self.model).__name__,
                why,
            )
            return processor
        scheduler = processor.scheduler
        kind: Any = type(scheduler)
        scheduler.__class__ = _drafting(kind)
        processor.__class__ = DraftingProcessor
        processor.model_runner.__class__ = _DraftingRunner
        processor.drafts = scheduler.drafts = self.drafts
        return processor


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


@cache
def _drafting(scheduler: type[Scheduler]) -> type[Scheduler]:
    """A scheduler's class whose decoding requests bring drafts."""
    return type(f"Drafting{scheduler.__name__}", (_DraftingScheduler, scheduler), {})


class _DraftingScheduler(Scheduler):
    """Schedules a decoding request with a draft behind its last token, where there is room.

    Attributes:
        offered: drafts of this step by request, before it is known who is scheduled.
        drafted: those that are scheduled.
    """

    drafts: Drafts
    offered: dict[str, list[int]] | None = None
    drafted: dict[str, list[int]]

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        self.drafted = {}
        if self.offered is None:
            room = self._room(token_budget)
            self.offered = self.drafts.propose(self._decoding(), room, self._longest())
        return super().schedule_batch(token_budget, cache_budget)

    def _decoding(self) -> list[RequestState]:
        active = self.active_requests.values()
        return [s for s in active if s.status == RequestStatus.DECODING and s.generated_len()]

    def _room(self, token_budget: int) -> int:
        """Tokens of a step that neither decoding needs nor prompts that can be begun."""
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
        return max(0, token_budget - needed - begun)

    def _longest(self) -> int:
        """Tokens that a draft may have: of what is fed at once, a sliding window keeps no more than
        its size, and what is accepted has to stay."""
        return min((window.sliding_window - 1 for window in _windows(self.cache)), default=_LONGEST)

    def _infer_request_tokens(self, state: RequestState, removed: set[str]) -> list[int]:
        tokens = super()._infer_request_tokens(state, removed)
        draft = (self.offered or {}).get(state.request_id)
        if not draft or state.status != RequestStatus.DECODING:
            return tokens
        # A draft is worth no other request's blocks: each may need one more.
        page = max(found.tokens_per_page for found in self.cache.cache_allocators.values())
        others = page * len(self.active_requests)
        fits = self.cache.can_store_request_tokens(state, others + 1 + len(draft), dry_run=True)
        return tokens + draft if fits else tokens

    def _schedule_request(
        self, state: RequestState, tokens: list[int], token_budget: int, removed: set[str]
    ) -> None:
        draft = (self.offered or {}).get(state.request_id)
        if not draft or state.status != RequestStatus.DECODING or len(tokens) == 1:
            super()._schedule_request(state, tokens, token_budget, removed)
            return
        # What does not fit is left out; the rest of a prompt would be fed later instead.
        state.tokens_to_process = tokens[:token_budget]
        self.drafted[state.request_id] = tokens[1:token_budget]


class _DraftingRunner(ModelRunner):
    """Shows the logits [places, vocab_size] from which tokens are chosen."""

    scores: torch.Tensor

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        self.scores = scores[0]
        super()._sample(scores, output_ids)


class DraftingProcessor(ContinuousBatchProcessor):
    """Reads the logits of drafted places, and keeps what plain decoding would have generated.

    Greedily a place's token is its best one; where tokens are drawn, each place draws its own from
    the distribution behind the draft so far, so what is kept has plain decoding's distribution.
    """

    drafts: Drafts

    def prepare_next_batch(self) -> bool:
        self.scheduler.offered, self.scheduler.drafted = None, {}
        self._started = time.perf_counter()
        self._overwritten: list[_Overwritten] = []
        ready = super().prepare_next_batch()
        active = self.scheduler.active_requests.keys() | self.scheduler.waiting_requests.keys()
        self.drafts.keep(set(active))
        return ready

    def _generation_step(self, model: torch.nn.Module) -> None:
        drafted = self.scheduler.drafted
        with self.drafts.scope():
            if drafted:
                self._drafted_step(model, drafted)
            else:
                super()._generation_step(model)

    def _drafted_step(self, model: torch.nn.Module, drafted: dict[str, list[int]]) -> None:
        io = self.inputs_and_outputs
        for future in io.requests_in_batch:
            self._remember(future.state, drafted.get(future.state.request_id, ()))
        batch = io.get_model_kwargs(use_padding=False)
        places, owners = self._places()
        batch["logits_indices"] = places.to(batch["logits_indices"].dtype)
        arguments = batch["logits_processor_args"]
        batch["logits_processor_args"] = arguments.index_select(1, owners)
        with torch.no_grad():
            self.model_runner.compute_batch(model, batch)
        io.retrieve_device_outputs()

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [places]: the fed tokens whose logits are read, and whose request each one is of,
        counted among the requests that generate."""
        places: list[int] = []
        owners: list[int] = []
        end = generating = 0
        for future in self.inputs_and_outputs.requests_in_batch:
            end += future.query_length
            if future.has_new_token:
                fed = 1 + len(self.scheduler.drafted.get(future.state.request_id, ()))
                places += range(end - fed, end)
                owners += [generating] * fed
                generating += 1
        device = self.model_device
        return torch.tensor(places, device=device), torch.tensor(owners, device=device)

    def _remember(self, state: RequestState, draft: Sequence[int]) -> None:
        """Copy what a draft overwrites of a request's sliding windows.

        A window's slots go round: a drafted token lies where an earlier one lies that is still seen
        should the draft be rejected.
        """
        if not draft:
            return
        first = state.position_offset - len(draft)
        for allocator in _windows(self.cache):
            if first + len(draft) > allocator.sliding_window:
                slots = allocator.get_write_indices(state.request_id, first, len(draft))
                self._overwritten.append(_Overwritten(state.request_id, allocator, slots))

    def update_batch(self) -> None:
        io = self.inputs_and_outputs
        drafted = self.scheduler.drafted
        states = [future.state for future in io.requests_in_batch if future.has_new_token]
        places = len(states) + sum(map(len, drafted.values()))
        chosen = io.output_ids[:, :places].clone()
        tokens = chosen[0].tolist()
        logprobs = chosen[1].view(torch.float32).tolist() if self.return_logprobs else None
        place = row = 0
        shown = []
        for future in io.requests_in_batch:
            if not future.has_new_token:
                continue
            state = future.state
            draft = drafted.get(state.request_id, [])
            kept = _kept(state, draft, tokens[place : place + 1 + len(draft)])
            self._take_back(future, len(draft) + 1 - len(kept), len(kept) if draft else 0)
            for number, token in enumerate(kept[:-1], place):
                state.update_and_check_completion(token, logprobs and logprobs[number])
                if state.streaming:
                    self.output_router.deliver(state.to_generation_output())
            io.output_ids[:, row] = chosen[:, place + len(kept) - 1]
            shown.append(FedRequest(state, draft, len(kept), place))
            place, row = place + 1 + len(draft), row + 1
        fed = sum(future.query_length for future in io.requests_in_batch)
        super().update_batch()
        self.drafts.follow(shown, self.model_runner.scores)
        del self.model_runner.scores
        if fed == places:
            self.drafts.time(places, time.perf_counter() - self._started)

    def _take_back(self, future: Any, rejected: int, kept: int) -> None:
        """Forget the last fed tokens of a request; `kept`: fed tokens that stay, 0 where none of
        them was drafted."""
        state = future.state
        if not kept:
            return
        state.position_offset -= rejected + kept
        future.complete_blocks = self.cache.count_new_complete_blocks(state, kept)
        state.position_offset += kept
        for overwritten in self._overwritten:
            if overwritten.request_id == state.request_id:
                overwritten.restore(rejected)

    def fail_all_requests(self, error: Exception) -> None:
        super().fail_all_requests(error)
        self.drafts.keep(set())

    def reset(self) -> None:
        super().reset()
        self.drafts.keep(set())


class _Overwritten:
    """Keys and values of a sliding window in slots that are about to be written."""

    def __init__(self, request_id: str, allocator: Any, slots: Sequence[int]):
        self.request_id = request_id
        self.slots = torch.tensor(slots)
        # Keys and values of each layer, [slots, heads, width].
        self.layers = list(allocator._kv_token_views.values())
        self.saved = [[view[self.slots.to(view.device)] for view in views] for views in self.layers]

    def restore(self, rejected: int) -> None:
        """Write back what lay in the slots of the last `rejected` tokens."""
        if not rejected:
            return
        for views, saved in zip(self.layers, self.saved, strict=True):
            for view, old in zip(views, saved, strict=True):
                view[self.slots[-rejected:].to(view.device)] = old[-rejected:]


def _windows(cache: Any) -> list[Any]:
    """What holds the keys and values of layers with a sliding window."""
    kinds = cache.cache_allocators.values()
    return [kind for kind in kinds if kind.layer_type == cache_allocators.SLIDING_ATTENTION]


def _kept(state: RequestState, draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """What plain decoding would have generated, given the token chosen behind each fed one."""
    ends = state.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    limit = None if state.max_new_tokens is None else state.max_new_tokens - state.generated_len()
    kept: list[int] = []
    for number, token in enumerate(chosen):
        kept.append(token)
        ended = token in ends or (limit is not None and len(kept) >= limit)
        if ended or number == len(draft) or draft[number] != token:
            break
    return kept
