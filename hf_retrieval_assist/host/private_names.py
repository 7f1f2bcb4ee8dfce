"""Every name of transformers that the package counts on and transformers does not promise.

A release is judged by looking for these names, and not by its number: :func:`why_plain` says what a
release lacks of those without which nothing can be assisted, :func:`absent` what it lacks of any
group. `docs/transformers_versions.md` shows the list, which this module prints when it is run.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import CodeType
from typing import Any, NamedTuple

from packaging.version import Version
from transformers import GenerationMixin, __version__

from ..system import versions
from ..system.log import get_logger

logger = get_logger(__name__)

# The releases under which the tests have run.
OLDEST, NEWEST = versions.OLDEST["transformers"], "5.24"


class PrivateName(NamedTuple):
    """A name of a release.

    Attributes:
        owner: "module:Class"; "module" of what the module itself defines.
        text: "attribute", or "method(parameter, ...)" with those that the package passes or that
            its override has.
        use: what the package does with it.
    """

    owner: str
    text: str
    use: str

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2]}.{self.text}"

    def lacking(self) -> str | None:
        """What this release lacks of it, in a line; None: nothing."""
        module, _, kind = self.owner.partition(":")
        name, method, parameters = self.text.partition("(")
        try:
            owner: Any = import_module(module)
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError) as error:
            return f"{self} is gone ({error}); used for {self.use}"
        if not hasattr(owner, name) and (method or name not in _mentioned(owner)):
            return f"{self} is gone; used for {self.use}"
        if not method:
            return None
        known = inspect.signature(getattr(owner, name)).parameters
        wanted = filter(None, parameters.rstrip(")").split(", "))
        missing = [parameter for parameter in wanted if parameter not in known]
        return f"{self} takes no {', '.join(missing)}; used for {self.use}" if missing else None


def _mentioned(owner: Any) -> set[str]:
    """Names of attributes that a class annotates, or that its methods read or set."""
    found: set[str] = set()
    for kind in getattr(owner, "__mro__", ()):
        found |= vars(kind).get("__annotations__", {}).keys()
        for member in vars(kind).values():
            function = inspect.unwrap(getattr(member, "fget", None) or member)
            for code in _codes(getattr(function, "__code__", None)):
                # Strings too, for what is read by `getattr` with its name.
                found.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
    return found


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)


# Each group's owners, and what is used of each: names, and behind a bar their use. Without the
# first group nothing is assisted, without the third managers of continuous batching run without
# drafts, without the last `hf-retrieval-assist serve` does not start, or answers no request.
_NAMES = """
# Needed by every assisted call
transformers:GenerationMixin
  generate(custom_generate) | the loop in transformers' place
  _prefill(input_ids, generation_config, model_kwargs) | the prompt's forward
  _sample(input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
    streamer) | plain decoding of calls without drafts
  prepare_inputs_for_generation(input_ids, next_sequence_length, is_first_iteration);
    _update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder) | the inputs of
    forwards behind the prompt
  _has_unfinished_sequences(this_peer_finished, synced_gpus, device) | other processes
  _supports_default_dynamic_cache(); _is_user_defined | the call's cache
  _valid_auto_compile_criteria(model_kwargs, generation_config) | plain steps
  _optimize_model_for_decode() | the experts of mixtures
  _pad_token_tensor | rows that have ended
transformers:PreTrainedModel
  _is_stateful | states that cannot be cropped
transformers:PreTrainedConfig
  _attn_implementation | the attention that runs
# Needed by some models
transformers:PreTrainedModel
  enable_input_require_grads() | hooks of trainers that change nothing
  _device_mesh | tensor and pipeline parallelism
  _keys_to_ignore_on_load_unexpected | MTP layers in a checkpoint
transformers.modeling_layers:MtpModel
  _project_to_logits() | MTP layers
# Needed by continuous batching
transformers.generation.continuous_batching.continuous_api:ContinuousBatchingManager
  add_request(input_ids, request_id) | an assistant of one request
  _create_batch_processor(); batch_processor | the place of the parts that draft
  input_queue | requests that know their assistant
transformers.generation.continuous_batching.continuous_api:ContinuousBatchProcessor
  prepare_next_batch(); _generation_step(model); update_batch() | a step's course
  fail_all_requests(error); _handle_request_error(error, state) | requests that were dropped
  scheduler; model_runner; inputs_and_outputs; cache; logit_processor; use_async_batching;
    distributed_helper; output_router; return_logprobs | its parts
transformers.generation.continuous_batching.model_runner:ModelRunner
  _sample(scores, output_ids) | a step's logits
  compute_batch(model, batch_data); inputs_and_outputs; pad_inputs | a step's forward
transformers.generation.continuous_batching.scheduler:Scheduler
  schedule_batch(token_budget, cache_budget); active_requests; waiting_requests;
    waiting_requests_order; cache; block_new_requests; max_requests_per_batch | room
  add_waiting_request(state); finish_request(request_id) | requests that cannot be served
  _infer_request_tokens(state, request_ids_to_remove_from_waiting); _schedule_request(state,
    request_tokens, token_budget, request_ids_to_remove_from_waiting) | a request's draft
transformers.generation.continuous_batching.cache:PagedAttentionCache
  can_store_request_tokens(state, request_len, dry_run); cache_allocators; read_cache_limit;
    max_tokens_read | room
  count_new_complete_blocks(state, request_len) | blocks behind a rejected draft
transformers.generation.continuous_batching.cache_allocators
  SLIDING_ATTENTION | layers with a window
transformers.generation.continuous_batching.cache_allocators:SlidingAttentionCacheAllocator
  get_write_indices(); _kv_token_views; sliding_window; layer_type; tokens_per_page | what a draft
    overwrites of a window
transformers.generation.continuous_batching.input_outputs:ContinuousBatchingIOs
  requests_in_batch | a step's inputs
  prepare_batch_tensors(requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens,
    max_kv_read, use_padding) | a step that is computed again
  output_ids | a step's tokens
transformers.generation.continuous_batching.requests:RequestState
  update_and_check_completion(token_id, logprob); to_generation_output(); request_id; status;
    generated_len(); initial_tokens; generated_tokens; position_offset; tokens_to_process;
    remaining_prefill_tokens; _eos_token_ids; max_new_tokens; _new_tokens_limit; streaming;
    create_equivalent_initial_request() | a request's text
transformers.generation.continuous_batching.requests:FutureRequestState
  state; query_length; has_new_token; complete_blocks | a request in a step
# Needed by the server
transformers.cli.serving.utils:GenerationState
  get_manager(model_id, use_cb); is_cb_alive(); shutdown() | the kinds of managers
transformers.cli.serving.utils:BaseGenerateManager
  generate_streaming(model, processor, inputs, gen_config, request_id, response_parser);
    generate_non_streaming(model, processor, inputs, gen_config, request_id) | a request's
    prediction and length
transformers.cli.serving.utils:CBGenerateManager
  init_cb(model, gen_config); _cb | the longest request of continuous batching
transformers.cli.serving.utils
  _StreamError(msg) | answers
transformers.cli.serving.utils:BaseHandler
  _build_generation_config(body, model_generation_config, use_cb) | fields of requests
transformers.cli.serving.chat_completion:ChatCompletionHandler
  _build_completion(usage); _build_chunk_sse(usage) | tokens of predictions
transformers.cli.serving.transcription:TranscriptionHandler
  _prepare_audio_inputs() | files without sound
transformers.cli.serving.model_manager:ModelManager
  load_model_and_processor(); load_model_streaming() | the model with its assistant
transformers.cli.serving.server
  build_server(model_manager, generation_state, enable_cors) | the routes
"""


def _groups(text: str) -> dict[str, list[PrivateName]]:
    """The names by the titles of their groups; lines that go on are indented further."""
    groups: dict[str, list[PrivateName]] = {}
    title = owner = ""
    for line in text.strip().replace("\n    ", " ").split("\n"):
        if line.startswith("# "):
            title = line[2:]
            groups[title] = []
        elif line.startswith("  "):
            names, _, use = line.strip().partition(" | ")
            groups[title] += [PrivateName(owner, name, use) for name in names.split("; ")]
        else:
            owner = line
    return groups


GROUPS = _groups(_NAMES)
GENERATE, SOME_MODELS, CONTINUOUS_BATCHING, SERVER = GROUPS.values()


def absent(names: Sequence[PrivateName]) -> list[str]:
    """What this release of transformers lacks of some names, a line each."""
    return [line for line in (name.lacking() for name in names) if line is not None]


def cache_parameter() -> str | None:
    """What `generate` calls the cache in a forward's keyword arguments; None: it is not found."""
    prepare: Any = GenerationMixin.prepare_inputs_for_generation
    parameters = inspect.signature(prepare).parameters.values()
    return next((p.name for p in parameters if "Cache" in str(p.annotation)), None)


@functools.cache
def why_plain() -> str | None:
    """Why no model can be assisted under this release of transformers; None: models can be.

    A release that nobody has tried is served, and said so once.
    """
    lacking = absent(GENERATE)
    if not lacking and cache_parameter() is None:
        lacking = ["prepare_inputs_for_generation takes no Cache"]
    if lacking:
        return (
            f"every call of every model is decoded plainly under transformers {__version__} "
            f"(tested: {OLDEST} to {NEWEST}), which lacks what an assistant works with: "
            f"{'; '.join(lacking)}"
        )
    if Version(__version__).release[:2] > Version(NEWEST).release:
        logger.warning(
            "transformers %s is newer than the releases that the assistant was tested with (%s to "
            "%s); each model still passes a test of its own before it is assisted",
            *(__version__, OLDEST, NEWEST),
        )
    return None


def table() -> str:
    """The list in Markdown, a row for each owner, without parameters."""
    lines = ["| names | used for |", "|---|---|"]
    for title, names in GROUPS.items():
        lines.append(f"| **{title}** | |")
        for owner, same in itertools.groupby(names, lambda name: name.owner):
            own = [*same]
            texts = ", ".join(f"`{name.text.partition('(')[0]}`" for name in own)
            uses = "; ".join(dict.fromkeys(name.use for name in own))
            lines.append(f"| `{owner.rpartition(':')[2]}`: {texts} | {uses} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
