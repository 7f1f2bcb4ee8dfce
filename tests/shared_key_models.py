"""Tiny targets that share keys among their layers, and assistants that read those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

from .lossless import build
from .tiny_models import randomise, tiny_config

# Class names but for their beginning.
FAMILIES = ("Gemma4", "Gemma4Unified")
BOTH_KINDS = ["sliding_attention", "full_attention"]


@contextmanager
def layers_that_all_reuse() -> Iterator[None]:
    """transformers 5.23 asks for a layer with keys of its own in every model, and so can build no
    assistant of those that it has."""
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES:
            config_class = getattr(transformers, family + "TextConfig")
            original = config_class.kv_sharing_modes.fget

            def modes(config: Any, original: Any = original) -> list[str | None]:
                if config.num_kv_shared_layers == config.num_hidden_layers:
                    return ["reuse"] * config.num_hidden_layers
                return original(config)

            patch.setattr(config_class, "kv_sharing_modes", property(modes))
        yield


def sharing_target(family: str = "Gemma4", shared: int = 2, **changes: Any) -> Any:
    """Six layers of two kinds, the last `shared` of which reuse keys."""
    return build(
        getattr(transformers, family + "ForCausalLM"),
        num_hidden_layers=6,
        num_kv_shared_layers=shared,
        layer_types=BOTH_KINDS * 3,
        **changes,
    )


def key_reader(
    family: str = "Gemma4", ordered: bool = False, backbone: int = 32, **changes: Any
) -> Any:
    """An assistant of two layers, half as wide as the target."""
    sizes = {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": BOTH_KINDS,
        "hidden_size": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }
    text = tiny_config(getattr(transformers, family + "TextConfig"), **(sizes | changes))
    # 67 ids fall into no equal groups.
    groups = {"use_ordered_embeddings": ordered, "num_centroids": 1}
    config = getattr(transformers, family + "AssistantConfig")(
        text_config=text, backbone_hidden_size=backbone, centroid_intermediate_top_k=1, **groups
    )
    torch.manual_seed(0)
    model = getattr(transformers, family + "AssistantForCausalLM")(config).eval()
    randomise(model)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    model.generation_config.num_assistant_tokens = 4
    return model
