"""`hf-retrieval-assist doctor`: what a bug report needs, and nothing that it must not have."""

import platform
import re

import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

import hf_retrieval_assist
from hf_retrieval_assist.host import private_names
from hf_retrieval_assist.tools.cli import main
from tests.support.byte_model import small_model


def examine(capsys, *arguments):
    """The parts of a report: title -> name -> value."""
    assert main(["doctor", *map(str, arguments)]) == 0
    parts = {}
    for part in capsys.readouterr().out.split("\n\n")[1:]:
        title, *lines = part.splitlines()
        parts[title] = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    return parts


def test_a_report_has_each_part_and_names_that_are_gone(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    parts = examine(capsys)
    assert "hf_secret" not in str(parts)
    assert platform.node() not in re.findall(r"[\w.-]+", str(parts))
    assert parts["versions"]["hf_retrieval_assist"] == hf_retrieval_assist.__version__
    assert parts["versions"]["torch"] == torch.__version__
    assert {"platform", "CPU", "kernels", "free memory", "threads"} <= {*parts["machine"]}
    assert parts["private names of transformers"] == {"absent": "none", "calls are served": "yes"}
    assert "model" not in parts
    monkeypatch.setattr(private_names, "NEEDED", ("transformers:GenerationMixin._nothing",))
    found = examine(capsys)["private names of transformers"]["absent"]
    assert found == "GenerationMixin._nothing"


PLAIN = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 64}


@pytest.mark.parametrize("plainly", [False, True])
def test_a_model_shows_how_it_is_served_or_why_not(capsys, tmp_path, plainly):
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**PLAIN)) if plainly else small_model()[0]
    model.save_pretrained(tmp_path)
    shown = examine(capsys, tmp_path, "--dtype", "bfloat16", "--device", "cpu")["model"]
    assert shown["class"] == type(model).__name__
    assert (shown["dtype"], shown["device"]) == ("bfloat16", "cpu")
    tiers = ("tree (a mask per layer type)", "plain (its forward takes no cache)")
    assert shown["tier"] == tiers[plainly]
    assert shown.get("attention by") == (None if plainly else "mask")


def test_a_model_that_cannot_be_loaded_leaves_the_rest_of_the_report(capsys, tmp_path):
    assert main(["doctor", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "\nprivate names of transformers\n" in printed.out
    assert printed.err.startswith("hf-retrieval-assist: error: ")
    assert printed.err.count("\n") == 1
