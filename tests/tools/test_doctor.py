"""`hf-retrieval-assist doctor`: what a bug report needs, and nothing that it must not have."""

import platform
import re

import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

import hf_retrieval_assist
from hf_retrieval_assist.host import private_names
from hf_retrieval_assist.tools.cli import main
from tests.support.byte_model import small_model


def parts_of(printed):
    """The parts of a report: title -> name -> value."""
    parts = {}
    for part in printed.split("\n\n")[1:]:
        title, *lines = part.splitlines()
        assert all(line.startswith("  ") for line in lines)
        parts[title] = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    return parts


def examine(capsys, *arguments):
    assert main(["doctor", *map(str, arguments)]) == 0
    return parts_of(capsys.readouterr().out)


def test_a_report_has_each_part(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("No prompts, texts or access tokens")
    assert "hf_secret" not in printed
    assert platform.node() not in re.findall(r"[\w.-]+", printed)
    parts = parts_of(printed)
    assert parts["versions"]["hf_retrieval_assist"] == hf_retrieval_assist.__version__
    assert parts["versions"]["torch"] == torch.__version__
    assert {"platform", "CPU", "kernels", "free memory", "threads"} <= {*parts["machine"]}
    assert parts["private names of transformers"]["calls are served"] == "yes"
    assert "model" not in parts


def test_a_model_shows_how_it_is_served(capsys, tmp_path):
    small_model()[0].save_pretrained(tmp_path)
    shown = examine(capsys, tmp_path, "--dtype", "bfloat16", "--device", "cpu")["model"]
    assert shown["class"] == "Gemma3ForCausalLM"
    assert (shown["dtype"], shown["device"]) == ("bfloat16", "cpu")
    assert shown["tier"] == "tree (a mask per layer type)"
    assert shown["attention by"] == "mask"


def test_a_model_that_is_decoded_plainly_shows_why(capsys, tmp_path):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    shown = examine(capsys, tmp_path, "--device", "cpu")["model"]
    assert shown["tier"] == "plain (its forward takes no cache)"
    assert "attention by" not in shown


def test_a_model_that_cannot_be_loaded_leaves_the_rest_of_the_report(capsys, tmp_path):
    assert main(["doctor", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "\nprivate names of transformers\n" in printed.out
    assert printed.err.startswith("hf-retrieval-assist: error: ")
    assert printed.err.count("\n") == 1
    assert main(["doctor", str(tmp_path), "--dtype", "int8"]) == 2


def test_names_that_are_gone_are_shown(capsys, monkeypatch):
    assert examine(capsys)["private names of transformers"]["absent"] == "none"
    names = ("transformers:GenerationMixin._nothing",)
    monkeypatch.setattr(private_names, "NEEDED", names)
    found = examine(capsys)["private names of transformers"]["absent"]
    assert found == "GenerationMixin._nothing"
