"""Every causal language model of transformers: assisted output equals plain output."""

from __future__ import annotations

import pytest
import torch

from .architectures import architectures
from .oracle_drafter import both
from .tiny_models import tiny_config, tiny_model

PROMPT = torch.tensor([[5, 9, 33, 21, 60, 7, 44, 9, 33, 12, 18, 50, 3, 29]])
NEW_TOKENS = 14


@pytest.mark.parametrize("name", architectures())
def test_architecture(name):
    model_class = architectures()[name]
    model = tiny_model(model_class, tiny_config(model_class.config_class))
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    for seed, sampled in enumerate((False, True)):
        plain, assisted, assistant = both(
            model,
            inputs,
            seed=seed,
            do_sample=sampled,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=sampled,
            output_logits=sampled,
        )
