"""Names of transformers that drafts in continuous batching count on, and transformers does not
promise; a release without one of them is not drafted for there."""

from __future__ import annotations

_FOLDER = "transformers.generation.continuous_batching"
_USED = {
    "continuous_api:ContinuousBatchingManager": ("add_request", "_create_batch_processor"),
    "continuous_api:ContinuousBatchProcessor": (
        *("prepare_next_batch", "_generation_step", "update_batch"),
        *("fail_all_requests", "_handle_request_error"),
    ),
    "continuous_api:ContinuousMixin": ("init_continuous_batching",),
    "model_runner:ModelRunner": ("_sample", "compute_batch", "maybe_pad_inputs"),
    "scheduler:Scheduler": (
        *("schedule_batch", "add_waiting_request", "finish_request"),
        *("_infer_request_tokens", "_schedule_request"),
    ),
    "cache:PagedAttentionCache": ("can_store_request_tokens", "count_new_complete_blocks"),
    "cache_allocators": ("SLIDING_ATTENTION",),
    "cache_allocators:SlidingAttentionCacheAllocator": ("get_write_indices",),
    "input_outputs:ContinuousBatchingIOs": ("prepare_batch_tensors",),
    "requests:RequestState": (
        *("update_and_check_completion", "to_generation_output", "generated_len"),
        "create_equivalent_initial_request",
    ),
}

CONTINUOUS_BATCHING = [
    f"{_FOLDER}.{owner}{'.' if ':' in owner else ':'}{name}"
    for owner, names in _USED.items()
    for name in names
]
"""See :func:`~hf_retrieval_assist.host.private_names.absent`."""
