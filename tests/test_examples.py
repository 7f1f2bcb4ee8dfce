"""Examples run as a user runs them, with a small random model in the place of the real one."""

import functools
import json
import runpy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

import hf_retrieval_assist
from hf_retrieval_assist import SamAssistant, demo_model

EXAMPLES = Path(__file__).parent.parent / "examples"


def small_model():
    """A random model with a vocabulary of bytes, so that every text has tokens of its own."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", *alphabet])}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, pad_token="<pad>")
    config = Gemma3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=32,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer


@pytest.fixture(autouse=True, params=["gemma3", "smollm2"])
def small_demo_model(request, monkeypatch):
    """A base model in float32, and one with a chat template in bfloat16."""
    model, tokenizer = small_model()
    if request.param == "smollm2":
        model = model.to(torch.bfloat16)
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(demo_model, "load_demo_model", lambda *_: (model, tokenizer))


@pytest.mark.parametrize("name", ["script", "pipeline", "chat"])
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["explore", pytest.param("compare", marks=pytest.mark.slow), "structured"]
)
def test_notebook(name, monkeypatch, capsys):
    if name == "structured":
        pytest.importorskip("xgrammar", reason="make test-structured")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    # Whether drafts pay on a model this small depends on the machine.
    drafting = functools.partial(SamAssistant, budget=8)
    if name == "explore":
        monkeypatch.setattr(hf_retrieval_assist, "SamAssistant", drafting)
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    pyplot.close("all")
    if name == "explore":
        assert names["record"].calls[0].generated(0).tolist() == names["output"][0, -128:].tolist()
        assert len(names["largest"].tree) > 0
    elif name == "structured":
        for record in (names["record"], names["unconstrained"]):
            assert record.by_origin()["grammar"][1] > 0
        assert torch.equal(names["output"], names["constrained"]())
    else:
        assert names["suggestion"].best.identical == len(names["prompts"])
        assert names["suggestion"].best.name in capsys.readouterr().out
