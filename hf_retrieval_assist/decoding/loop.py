"""The decoding loop: propose, prune, verify in one forward, walk, keep, learn.

`decode` is what transformers calls in place of its own sampling loop (`custom_generate`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..drafters.base import Target
from ..drafters.feedback import RowFeedback
from ..drafters.residual import verify_node
from ..kernels.reroute import reroute
from ..planning.cost_model import CostModel
from ..planning.cost_store import CostKey, size_bucket
from ..stats import CallStats
from ..target.feature_taps import FeatureTaps
from ..target.fingerprint import fingerprint
from ..target.kv_cache import SlotCache, has_slots
from ..target.ranks import Ranks
from ..target.service import REPLAYS_ONE_ROW, Service, Tier, cache_for, choose_service
from ..token_tree import TokenTree
from .recorder import OutputRecorder
from .walk import RowText, Stopping, TokenSelector, strip_padding, walk

if TYPE_CHECKING:
    from ..assistants import Assistant, AssistantSession

logger = logging.getLogger(__name__)

# Processors whose state follows all rows of a batch from step to step.
_STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


# Keyword arguments with one entry per token.
_PER_TOKEN = (
    "attention_mask",
    "decoder_attention_mask",
    "position_ids",
    "decoder_position_ids",
    "token_type_ids",
    "mm_token_type_ids",
)


def decode(
    model: Any,
    assistant: Assistant,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate as transformers' sampling loop does, in fewer forwards.

    Args:
        model: a transformers model with a language modelling head.
        assistant: where drafts come from.
        input_ids: int64 [batch, length], left-padded.
        logits_processor, stopping_criteria, generation_config: as `generate` prepared them.
        synced_gpus: go on with empty forwards until the other processes have finished.
        streamer: receives every token, batch size 1 only.
        model_kwargs: further inputs of the forward, as `generate` prepared them.

    Returns:
        What `generate` returns: int64 [batch, length], or an output object.
    """
    if (refusal := refused_mode(generation_config)) is not None:
        raise ValueError(refusal)
    service = _service(model, input_ids, logits_processor, generation_config, model_kwargs)
    call = CallStats(tier=service.tier.value, calls=1)
    started = time.perf_counter()
    loop = _plain if service.tier is Tier.PLAIN else _assisted
    result = loop(
        model=model,
        assistant=assistant,
        service=service,
        call=call,
        input_ids=input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        model_kwargs=model_kwargs,
    )
    call.seconds["total"] = time.perf_counter() - started
    assistant.record(call)
    assistant.costs.save_at_times(fingerprint(model))
    return result


# What asks for other ways of decoding.
_MODE_ARGUMENTS = {
    GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
    GenerationMode.DOLA_GENERATION: "dola_layers",
    GenerationMode.ASSISTED_GENERATION: "prompt_lookup_num_tokens",
}


def refused_mode(config: GenerationConfig) -> str | None:
    """What in a configuration asks for another way of decoding than the loop's; None: nothing."""
    if (config.num_beams or 1) > 1:
        return f"num_beams: expected 1 with an assistant, got {config.num_beams}"
    mode = config.get_generation_mode()
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return None
    return (
        f"{_MODE_ARGUMENTS.get(mode, 'generation_config')}: expected greedy decoding or "
        f"sampling with an assistant, got {mode.value.replace('_', ' ')}"
    )


def _service(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Service:
    """How this call is served: the model's tier, or plain where the call's arguments demand it."""
    service = choose_service(model, model_kwargs)
    batch_size = len(input_ids)
    why = None
    if config.use_cache is False:
        why = "use_cache=False"
    elif config.cache_implementation not in (None, "dynamic", "static"):
        why = f"cache_implementation={config.cache_implementation!r}"
    elif not _takes_over(model_kwargs.get(service.cache_name), service):
        why = "past_key_values is a cache whose tokens cannot be dropped one by one"
    elif batch_size > 1 and any(isinstance(p, _STATEFUL) for p in processors):
        why = "a logits processor keeps a state of the whole batch"
    elif batch_size > 1 and service.tier is Tier.REPLAY:
        why = REPLAYS_ONE_ROW
    elif batch_size > 1 and (config.output_attentions or config.output_hidden_states):
        why = "attentions and hidden states of rows with unequal progress do not fit together"
    if why is None:
        return service
    if service.tier is not Tier.PLAIN:
        logger.info("%s: plain for this call (%s)", type(model).__name__, why)
    return Service(Tier.PLAIN, why)


def _takes_over(cache: Any, service: Service) -> bool:
    """Whether the call's cache can serve: made by `generate`, a slot cache, or a dynamic one."""
    cache = getattr(cache, "self_attention_cache", cache)
    if service.tier is Tier.PLAIN or not getattr(cache, "_is_user_defined", False):
        return True
    return isinstance(cache, SlotCache) or has_slots(cache)


def cost_key(model: Any, input_ids: torch.Tensor, cache_length: int = 0) -> CostKey:
    """What t(n) of a call with these inputs depends on, int64 [batch, length]."""
    return CostKey(
        fingerprint=fingerprint(model),
        device=str(input_ids.device),
        dtype=str(model.dtype),
        attention=str(getattr(model.config, "_attn_implementation", None)),
        batch_size=size_bucket(len(input_ids)),
        cache_length=size_bucket(cache_length),
    )


def _plain(model: Any, call: CallStats, model_kwargs: dict[str, Any], **arguments: Any) -> Any:
    """transformers' own loop."""
    input_ids = arguments["input_ids"]
    kept = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
    result = model._sample(input_ids, **{name: arguments[name] for name in kept}, **model_kwargs)
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    call.steps = sequences.shape[1] - input_ids.shape[1]
    call.tokens = call.steps * len(input_ids)
    return result


def _assisted(
    model: Any,
    assistant: Assistant,
    service: Service,
    call: CallStats,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    synced_gpus: bool,
    **arguments: Any,
) -> Any:
    generation = Generation(model, assistant, service, call, input_ids, model_kwargs, **arguments)
    try:
        generation.ranks.begin()
        generation.prefill()
        # The criteria may be met by the first token; other processes may still wait for forwards.
        while model._has_unfinished_sequences(
            generation.finished, synced_gpus, device=input_ids.device
        ):
            generation.step()
        result = generation.result()
        generation.ranks.end()
        return result
    except BaseException:
        generation.ranks.fail()
        raise
    finally:
        generation.close()


@dataclass
class Span:
    """A stretch of time."""

    seconds: float = 0.0


class Generation:
    """One call to `generate`: its rows, their draft sessions, the cache and the outputs."""

    def __init__(
        self,
        model: Any,
        assistant: Assistant,
        service: Service,
        call: CallStats,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any,
    ):
        self.model = model
        self.assistant = assistant
        self.service = service
        self.call = call
        self.input_ids = input_ids
        self.model_kwargs = model_kwargs
        self.config = generation_config
        self.criteria = stopping_criteria
        self.streamer = streamer
        self.select = TokenSelector(logits_processor, generation_config.do_sample, len(input_ids))
        self.stopping = Stopping(stopping_criteria)
        self.outputs = OutputRecorder(generation_config, len(input_ids))
        limit = self.stopping.max_length
        # The buffer doubles when a call has no limit or a far one.
        room = 256 if limit is None else min(max(1, limit - input_ids.shape[1]), 4096)
        self.rows = [RowText(i, ids, room) for i, ids in enumerate(input_ids)]
        self.cache = self._slot_cache(input_ids.shape[1] + room)
        self.cost_key = cost_key(model, input_ids)
        self.cost = assistant.costs.get(self.cost_key)
        self.ranks = Ranks.of(model)
        # Every rank has to compute the same bits, which methods chosen by timings need not give.
        alone = not self.ranks.several
        if assistant.residual and generation_config.do_sample and not alone:
            # The other ranks would not know what the first one has drawn from.
            raise ValueError("residual: expected False with a tensor-parallel model, got True")
        self.reroute = reroute(alone and assistant.reroute and input_ids.device.type == "cpu")
        self.taps = FeatureTaps(model, assistant.hidden_layers)
        self.sessions: list[AssistantSession] = self._start_sessions()

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    @property
    def running(self) -> list[RowText]:
        return [row for row in self.rows if not row.finished]

    def _slot_cache(self, capacity: int) -> SlotCache:
        """Put a slot cache in the place of the one that `generate` prepared."""
        name, config = self.service.cache_name, self.model.config.get_text_config(decoder=True)
        given: Any = self.model_kwargs.get(name)
        own = getattr(given, "self_attention_cache", given)
        if getattr(given, "_is_user_defined", False):
            cache = SlotCache.around(own, config)
            if given is not own:
                given.self_attention_cache = cache
            return cache
        cache = SlotCache(config, capacity)
        self.model_kwargs[name] = cache_for(self.model, cache)
        return cache

    def _start_sessions(self) -> list[AssistantSession]:
        target = Target(
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            device=self.input_ids.device,
            fingerprint=fingerprint(self.model),
            model=self.model,
        )
        prompts = strip_padding(self.input_ids, self.model_kwargs.get("attention_mask"))
        return [self.assistant.start(ids.cpu().numpy().astype(np.int32), target) for ids in prompts]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[Span]:
        span, started = Span(), time.perf_counter()
        yield span
        span.seconds = time.perf_counter() - started
        self.call.seconds[phase] += span.seconds

    def prefill(self) -> None:
        """transformers' own prefill, and the first token of every row."""
        empty, roots = [TokenTree.empty()] * len(self.rows), [0] * len(self.rows)
        with self._timed("prefill"):
            with self.taps:
                outputs = self.model._prefill(self.input_ids, self.config, self.model_kwargs)
            self._take_over(outputs)
            self.outputs.prefill(outputs)
            tokens, _ = self._walk(empty, outputs.logits[:, -1:], roots)
        with self._timed("draft"):
            states = self.taps.features
            for i, (session, new) in enumerate(zip(self.sessions, tokens, strict=True)):
                logits = outputs.logits[i] if self.assistant.needs_logits else None
                session.begin(new, logits, {name: found[i] for name, found in states.items()})

    def _take_over(self, outputs: Any) -> None:
        """Start the verifier from what the prefill left."""
        self.cache.begin(len(self.rows))
        updated = self.model._update_model_kwargs_for_generation(
            outputs,
            dict(self.model_kwargs),
            is_encoder_decoder=self.model.config.is_encoder_decoder,
        )
        # The verifier counts on from the prompt by itself.
        prompt = {name: self.model_kwargs[name] for name in _PER_TOKEN if name in self.model_kwargs}
        self.model_kwargs = updated | prompt
        self.verifier = self.service.verifier(
            self.model, self.cache, self.model_kwargs, self.input_ids
        )

    def step(self) -> None:
        """Verify one tree per running row in one forward."""
        running = self.running
        with self._timed("draft"):
            trees = self._drafts()
        with self._timed("forward") as forward, self.taps, self.reroute:
            outputs, roots = self.verifier.forward(self.rows, trees)
        with self._timed("walk") as waiting:
            tokens, accepted = self._walk(trees, outputs.logits, roots)
            if self.outputs.wants_states:
                fed = [*range(roots[0]), *(roots[0] + i for i in accepted[0])]
                self.outputs.step(outputs, fed, roots[0], self.cache)
        with self._timed("cache"):
            self.verifier.keep(self.rows, accepted)
        self._observe(forward.seconds, waiting.seconds)
        with self._timed("draft"):
            for row in running:
                i = row.index
                self._count(trees[i], accepted[i])
                feedback = None
                if self.assistant.needs_feedback:
                    feedback = self._feedback(row, trees[i], tokens[i], accepted[i], outputs, roots)
                self.sessions[i].commit(tokens[i], feedback)

    def _drafts(self) -> list[TokenTree]:
        """What to verify of each row; nothing of finished ones, which bring no more tokens."""
        trees = [TokenTree.empty()] * len(self.rows)
        extra = self.verifier.backlog(self.rows)
        if running := self.running:
            planned = self.ranks.agree(lambda: self._plan(running, extra), len(running))
            for row, tree in zip(running, planned, strict=True):
                trees[row.index] = tree
        self._width = 1 + extra + max(map(len, trees))
        return trees

    def _plan(self, running: Sequence[RowText], extra: int) -> list[TokenTree]:
        drafts = self.verifier.limit([self._draft(row) for row in running])
        return self.assistant.plan(drafts, self.cost, extra)

    def _draft(self, row: RowText) -> TokenTree:
        remaining = self.stopping.remaining(row)
        # The last token that may be generated needs no node: the walk draws it at its parent.
        depth = None if remaining is None else max(0, remaining - 1)
        return self.sessions[row.index].propose(depth, self._current_cost())

    def _current_cost(self) -> CostModel:
        """The measured t(n) of forwards like the next one."""
        bucket = size_bucket(self.cache.slots.longest)
        if bucket != self.cost_key.cache_length:
            self.cost_key = replace(self.cost_key, cache_length=bucket)
            self.cost = self.assistant.costs.get(self.cost_key)
        return self.cost

    def _observe(self, forward: float, walk: float) -> None:
        """Learn the cost of the step that was just timed."""
        cost = self.cost
        # On an accelerator the forward has only been queued when the call returns; the walk waits
        # for its logits.
        waited = forward if self.input_ids.device.type == "cpu" else forward + walk
        cost.observe(self._width, waited)
        cost.observe_overhead("walk", walk if waited == forward else 0.0)

    def _walk(
        self, trees: Sequence[TokenTree], logits: torch.Tensor, roots: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Walk every running row. Returns new tokens and accepted fed tokens per row."""
        tokens: list[list[int]] = [[] for _ in self.rows]
        accepted: list[list[int]] = [[] for _ in self.rows]
        running = [row for row in self.rows if not row.finished]
        self._text_lengths = [len(row.generated) for row in self.rows]
        choose = self._chooser(logits, roots)
        for row in running:
            i = row.index
            tokens[i], accepted[i] = walk(row, trees[i], choose, self._stopped)
        return tokens, accepted

    def _chooser(self, logits: torch.Tensor, roots: list[int]) -> Callable[[RowText, int], int]:
        """(row, k) -> token from the logits [batch, width, vocab_size] of its k-th fed token."""
        if not self.select.greedy or self.outputs.wants_scores or self.outputs.wants_logits:
            return lambda row, k: self._choose(row, logits[row.index, roots[row.index] + k])
        if logits.device.type == "cpu":
            # A row costs as much as the walk saves by not looking at it.
            return lambda row, k: int(logits[row.index, roots[row.index] + k].argmax())
        # One transfer instead of one per token; a wider dtype would not change an order.
        best = logits.argmax(dim=-1).tolist()
        return lambda row, k: best[row.index][roots[row.index] + k]

    def _choose(self, row: RowText, logits: torch.Tensor) -> int:
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self.select.process(row, raw)
        self.outputs.token(row, scores, raw)
        if self.assistant.residual and self.select.do_sample:
            path = row.generated[self._text_lengths[row.index] :]
            proposal = self.sessions[row.index].proposal(path)
            if proposal is not None:
                law = scores[0].softmax(dim=-1)
                draft = proposal.draft.to(law.device)
                return verify_node(law, draft, proposal.children.to(law.device))[1]
        return self.select.choose(scores)

    def _stopped(self, row: RowText) -> bool:
        self.stopping.finish(row, self.rows, self.outputs.scores(row))
        if self.streamer is not None:
            self.streamer.put(torch.tensor([row.last]))
        return row.finished

    def _count(self, tree: TokenTree, accepted: list[int]) -> None:
        self.call.steps += 1
        self.call.drafted += len(tree)
        self.call.accepted += len(accepted) - 1

    def _feedback(
        self,
        row: RowText,
        tree: TokenTree,
        tokens: list[int],
        accepted: list[int],
        outputs: Any,
        roots: list[int],
    ) -> RowFeedback:
        """What the forward showed about one row."""
        i, first = row.index, roots[row.index]
        path = [first + k for k in accepted]
        root = np.array([row.generated[-len(tokens) - 1]], np.int32)
        return RowFeedback(
            token_ids=np.concatenate([root, tree.token_ids]),
            accepted=np.array(accepted, np.int32),
            logits=outputs.logits[i, first : first + 1 + len(tree)],
            hidden_states={name: found[i, path] for name, found in self.taps.features.items()},
        )

    def result(self) -> Any:
        """What plain `generate` returns."""
        longest = self._cut()
        new = self.input_ids.new_zeros((len(self.rows), longest))
        if any(len(row.generated) < longest for row in self.rows):
            new += self.config._pad_token_tensor.to(new.device)
        for row in self.rows:
            new[row.index, : len(row.generated)] = new.new_tensor(row.generated)
        self.call.tokens = sum(len(row.generated) for row in self.rows)
        if self.streamer is not None:
            self.streamer.end()
        return self.outputs.result(
            torch.cat([self.input_ids, new], dim=1),
            self.model_kwargs.get(self.service.cache_name),
            self.model_kwargs.get("encoder_outputs"),
            longest,
        )

    def _cut(self) -> int:
        """Drop what rows generated while they waited for others; the longest row's tokens."""
        end = self.stopping.end(self.rows)
        self.verifier.finish(end)
        for row in self.rows:
            del row.generated[end:]
        return end

    def close(self) -> None:
        for session in self.sessions:
            session.close()
