"""What the package uses of transformers and accelerate under names that are not public.

Nothing else in the package spells such a name, so a release that changes one breaks this file only.
Whatever differs between the supported versions is bridged here too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, __version__
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..structures.modules import hooked, modules_of
from .private_names import cache_parameter

PIPELINES_SINCE = Version("5.23")

# What outputs call a cache. Up to 5.23 forwards of recurrent models have another name for it.
CACHE = cache_parameter() or "cache"
CACHE_NAMES = (CACHE, "cache_params")
# Those under which any release takes a cache from the caller of `generate`.
_GIVEN_NAMES = (CACHE, "cache", "past_key_values", "cache_params")


@cache
def _parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters


def forward_parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    """Those of the class's forward: an instance's may be wrapped by hooks that take anything."""
    return _parameters_of(type(module).forward)


def takes_positions(model: Any) -> bool:
    """Whether `generate` hands positions to a model: it asks the instance's forward, which may be a
    caller's own that takes anything."""
    return "position_ids" in inspect.signature(model.forward).parameters


def cache_name(module: Any) -> str | None:
    """The keyword for the cache in a module's forward; None: it takes none."""
    return next((name for name in CACHE_NAMES if name in forward_parameters(module)), None)


def with_cache(module: Any, held: Any) -> dict[str, Any]:
    """The keyword argument that hands a cache to the forward of a module that takes one."""
    return {cache_name(module) or CACHE: held}


def given_cache(kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The cache among the arguments of `generate`, and its name there; None where there is none."""
    names = (name for name in _GIVEN_NAMES if kwargs.get(name) is not None)
    name = next(names, CACHE)
    return name, kwargs.get(name)


def prefill(
    model: Any, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """The forward over the prompt as `generate` runs it; the cache is in `model_kwargs`."""
    return model._prefill(input_ids, config, model_kwargs)


def sample(model: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
    """transformers' own loop for greedy decoding and sampling."""
    return loop_of(model)(model, input_ids, **arguments)


def loop_of(model: Any) -> Any:
    """The loop by which `generate` decodes greedily and samples: of the class, not the instance."""
    owner: Any = model if isinstance(model, type) else type(model)
    return owner._sample


def loop() -> Any:
    """transformers' own loop, without what decorates it."""
    return inspect.unwrap(GenerationMixin._sample)


def kwargs_after(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The forward's keyword arguments for the token that follows `outputs`."""
    return model._update_model_kwargs_for_generation(
        outputs, dict(model_kwargs), is_encoder_decoder=model.config.is_encoder_decoder
    )


def has_unfinished(model: Any, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Whether this process, or under `synced_gpus` any other one, has tokens to generate."""
    return model._has_unfinished_sequences(finished, synced_gpus, device=device)


def pad_token(config: GenerationConfig) -> torch.Tensor | None:
    """The id that fills rows which have ended, as a tensor; None where there is none."""
    return config._pad_token_tensor


def is_callers(cache: Any) -> bool:
    """Whether a call's cache is the caller's own and not one that `generate` made."""
    return bool(getattr(cache, "_is_user_defined", False))


def attention_of(config: Any) -> str:
    """The attention implementation of a model's configuration, "" where it names none."""
    return getattr(config, "_attn_implementation", None) or ""


OWN_NAMES = frozenset(
    (
        *("_require_grads_hook", "_require_grads_hooks"),
        *("_compiled_call", "_last_compile_config", "_previous_max_cache_length"),
    )
)
"""What a model keeps of hooks that mark its embeddings for gradients, and of plain decoding that
compiles its forward."""


def _marks_gradients(hook: Any) -> bool:
    """Whether a hook is transformers' own that marks embeddings for gradients and changes nothing.

    Trainers that turn gradient checkpointing off for `generate` leave one more behind each time.
    """
    name = getattr(hook, "__qualname__", "")
    made_in = PreTrainedModel.enable_input_require_grads
    of_library = getattr(hook, "__module__", "") == made_in.__module__
    return of_library and name.startswith(f"{made_in.__qualname__}.")


class Hook(NamedTuple):
    """A hook round a module's forward, or round those of all modules.

    Attributes:
        called: what is called.
        keywords: whether it is shown keyword arguments.
    """

    called: Any
    keywords: bool


def hooks_of(*modules: nn.Module) -> list[Hook]:
    """The hooks of modules without those that change nothing of a forward."""
    return [
        Hook(hook, number in shown)
        for module in hooked(modules)
        for table, shown in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        )
        for number, hook in table.items()
        if not _marks_gradients(hook)
    ]


def global_hooks() -> list[Hook]:
    """The hooks round the forwards of all modules of the process."""
    module = torch.nn.modules.module
    shown = module._global_forward_hooks_with_kwargs
    after = [Hook(hook, number in shown) for number, hook in module._global_forward_hooks.items()]
    # Those before forwards are shown no keyword arguments.
    return after + [Hook(hook, False) for hook in module._global_forward_pre_hooks.values()]


def active_modes() -> list[Any]:
    """The modes that see the running thread's operators and functions."""
    functions = torch.overrides._get_current_function_mode_stack()
    return [*torch.utils._python_dispatch._get_current_dispatch_mode_stack(), *functions]


def compiles(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether plain decoding compiles the model's forwards behind the prompt.

    Args:
        model_kwargs: `generate`'s, with the cache that it made or was given.
    """
    return bool(model._valid_auto_compile_criteria(model_kwargs, config))


def compilations() -> int:
    """Graphs that `torch.compile` has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class OptimisedForDecode:
    """transformers' scope of decoding steps, in which experts are computed on accelerators by a
    method that copies their weights for each token: left while forwards feed more than a few.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inside = ExitStack()
        self.wanted = False

    def want(self, wanted: bool) -> None:
        """Be inside of it from now on, or outside."""
        if wanted and not self.wanted:
            self.inside.enter_context(self.model._optimize_model_for_decode())
        elif not wanted:
            self.inside.close()
        self.wanted = wanted


def why_no_mask(config: Any) -> str | None:
    """Why the attention that a model was loaded with takes no tree mask; None: it takes one."""
    attention = attention_of(config)
    if "flash" in attention:
        return "flash attention takes no tree mask"
    if "flex" in attention:
        # Its kernel, compiled for a CPU, writes past its buffers when given a mask as a tensor.
        return "flex attention takes block masks only"
    return None


# What modules import that hide from a token what its layer's window or chunk has passed.
_MASKS = (
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)


def masks_windows(model: Any) -> bool:
    """Whether a model's forwards make masks of windows: others see all tokens that are fed
    together, though their caches keep a window, so that a prompt in parts is another one."""
    names = {kind.__module__ for kind in map(type, modules_of(model))}
    return any(hasattr(sys.modules.get(name), mask) for name in names for mask in _MASKS)


def takes_dynamic_cache(model: Any) -> bool:
    return model._supports_default_dynamic_cache()


def checkpoints_activations(model: Any) -> bool:
    """Whether the model computes activations anew in the backward pass, for which it gives up its
    cache in train mode."""
    newest = "is_activation_checkpointing"  # 5.23 and later
    return getattr(model, newest if hasattr(model, newest) else "is_gradient_checkpointing")


def is_stateful(model: Any) -> bool:
    """Whether transformers knows of a state that cannot be cut back to an earlier token."""
    return bool(getattr(model, "_is_stateful", False))


def shards_need_company(model: Any) -> bool:
    """Whether every process has to run as many forwards as the slowest, as `generate` decides."""
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return bool(sharded and distributed and torch.distributed.get_world_size() > 1)


def _several(model: Any, dimension: str) -> Any:
    """The model's mesh along a named dimension, as transformers noted it, where that spans more
    than one process; otherwise None."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
        return None
    return mesh[dimension] if mesh[dimension].size() > 1 else None


def parts_group(model: Any) -> Any:
    """The processes that compute every forward of a model together, each a part of its layers
    (pipeline parallelism) or of their weights (tensor parallelism), as transformers noted them;
    None: this process has it whole."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and not mesh.mesh_dim_names:
        return mesh.get_group() if mesh.size() > 1 else None
    part = _several(model, "pp") or _several(model, "tp")
    return None if part is None else part.get_group()


def is_pipeline(model: Any) -> bool:
    """Whether the model's layers are spread over processes."""
    return _several(model, "pp") is not None


def why_plain_in_pipeline(model: Any) -> str | None:
    """Why a model whose layers are spread over processes is decoded plainly by all of them; None:
    it need not be."""
    if not is_pipeline(model) or Version(__version__) >= PIPELINES_SINCE:
        return None
    # There one process can find its part of a tree's forward wrong while others wait for it.
    return f"pipeline parallelism needs transformers {PIPELINES_SINCE}, got {__version__}"


def compute_device(layer: nn.Module, otherwise: torch.device | None = None) -> torch.device:
    """Where a layer computes, also when accelerate keeps its weights elsewhere.

    Args:
        layer: any module.
        otherwise: the answer for a module without parameters; None: the CPU.
    """
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    parameter = next(layer.parameters(), None)
    return otherwise or torch.device("cpu") if parameter is None else parameter.device


def input_device(model: Any) -> torch.device:
    """Where a model wants its inputs: where its embeddings are looked up."""
    return compute_device(model.get_input_embeddings(), model.device)


def is_offloaded(layer: nn.Module) -> bool:
    """Whether accelerate fetches the layer's weights when it runs."""
    return hasattr(layer, "_hf_hook")


def onloaded(layer: nn.Module) -> AbstractContextManager[Any]:
    """Scope in which the layer's weights are at hand."""
    if not is_offloaded(layer):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(layer)


def mtp_logits(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The shared output layer of an `MtpModel`, with the scale and the cut of its model's own."""
    return module._project_to_logits(hidden)


def unloaded_patterns(model: Any) -> tuple[str, ...]:
    """Patterns of the tensors in a checkpoint that the model's class knows and does not load."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
