"""Every name of transformers that continuous batching and the server count on and transformers does
not promise; see :mod:`~hf_retrieval_assist.host.private_names`."""

from __future__ import annotations

from ...host.private_names import groups, table

# Managers of continuous batching run without drafts without the first group; without the second
# `hf-retrieval-assist serve` does not start, or answers no request.
_NAMES = """
# Needed by continuous batching
transformers.generation.continuous_batching.continuous_api:ContinuousBatchingManager
  add_request(input_ids, request_id) | an assistant of one request
  _create_batch_processor(); batch_processor; model | the place of the parts that draft
  input_queue | requests that know their assistant
transformers.generation.continuous_batching.continuous_api:ContinuousBatchProcessor
  prepare_next_batch(); _generation_step(model); update_batch() | a step's course
  fail_all_requests(error); _handle_request_error(error, state) | requests that were dropped
  scheduler; model_runner; inputs_and_outputs; cache; logit_processor; use_async_batching;
    distributed_helper; output_router; return_logprobs; offloading_manager | its parts
transformers.generation.continuous_batching.offloading_manager:OffloadingManager
  scheduler | requests that are sent back
transformers.generation.continuous_batching.continuous_api:ContinuousMixin
  init_continuous_batching(); _cached_continuous_batching_manager | managers that are kept
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
transformers.generation.continuous_batching.continuous_api:ContinuousBatchingManager
  background_thread_status; output_router; batch_processor | a worker that died, answers that were
    left
transformers.cli.serving.utils
  build_response_parser(processor, model, input_ids); get_response_template(processor,
    model); response_events_to_chunks(events); ReasoningText; ToolCall; Modality | reasoning and
    calls in answers, what a model reads
transformers.cli.serving.utils:BaseHandler
  get_processor_inputs_from_messages(messages, modality) | messages
transformers.cli.serving.response:ResponseHandler
  _normalize_input(body) | items of a conversation
transformers.cli.serving.model_manager:ModelManager
  load_model_and_processor(); process_model_name(model_id); get_model_modality(model, processor) |
    the model
"""

GROUPS = groups(_NAMES)
CONTINUOUS_BATCHING, SERVER = GROUPS.values()

if __name__ == "__main__":
    print(table(GROUPS))
