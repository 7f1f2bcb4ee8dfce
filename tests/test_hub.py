"""The repository for the model hub, loaded by transformers from its folder."""

from functools import partial
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_retrieval_assist

from .support.lossless import NEW_TOKENS, PROMPT, run
from .support.watching import fed_shapes

HUB = Path(__file__).parent.parent / "hub"


@pytest.fixture
def generate(monkeypatch, tmp_path):
    """A call by way of the repository, whose code is copied to a cache of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    # It would draft where that pays, which no test may hang on.
    eager = partial(hf_retrieval_assist.SamAssistant, budget=8)
    monkeypatch.setattr(hf_retrieval_assist, "SamAssistant", eager)
    # The package is installed in place or only on the path; both will do.
    check = "transformers.generation.utils.check_python_requirements"
    monkeypatch.setattr(check, lambda *_, **__: None)
    return partial(run, custom_generate=str(HUB), trust_remote_code=True)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_tokens_are_plains(model, generate, options):
    with fed_shapes(model) as shapes:
        assisted = [generate(model, drafts="suffix", **options) for _ in range(3)]
    plain = run(model, **options)
    assert all(torch.equal(plain, ids) for ids in assisted)
    # A prefill and a forward for every further token, had nothing been drafted.
    assert len(shapes) < 3 * NEW_TOKENS


def test_beside_a_models_own_weights(model, generate, tmp_path):
    """There the model's `generate` is this function, bound when the model is loaded."""
    plain, folder = run(model), tmp_path / "model"
    model.save_pretrained(folder)
    copytree(HUB / "custom_generate", folder / "custom_generate")
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert "generate" in vars(loaded)
    loaded.generation_config = model.generation_config
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    assert torch.equal(plain, loaded.generate(**inputs, **options))
