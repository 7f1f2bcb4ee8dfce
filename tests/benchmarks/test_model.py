"""The benchmark on a real model, on a small random one; timings are not looked at."""

import json
import re
import sys

import pytest
import torch

from benchmarks import inputs, llama_engine, model, tables, timing
from benchmarks.__main__ import parse
from benchmarks.inputs import Prompt
from benchmarks.methods import Run
from hf_retrieval_assist.tools.demo_model import load_demo_model
from tests.support.rounding import near

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model
from ..support.lossless import PROMPT, build

pytestmark = pytest.mark.slow

NAMES = ["plain", "prompt lookup", "prompt lookup in reroute", "kernels"]
NAMES += ["+ copies", "+ recordings", "+ drafts", "+ drafts, a dozen before"]


@pytest.fixture
def small(monkeypatch):
    """A quick run on a small model, which leaves the user's choices of kernels alone."""
    monkeypatch.setattr(model, "load", lambda arguments: small_model())


def test_a_file_for_a_model_and_a_dtype_after_each_way_of_decoding(small, tmp_path, monkeypatch):
    written = []
    fill = model.fill
    monkeypatch.setattr(
        model, "fill", lambda *given: written.append(len(list(tmp_path.iterdir()))) or fill(*given)
    )
    report = model.run(quick("--output", tmp_path, "--model", "small"), silent)
    assert written == [0, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["model-small-float32.json"]
    saved = json.loads((tmp_path / "model-small-float32.json").read_text())
    assert saved["settings"].items() >= {"model": "small", "dtype": "float32"}.items()
    whole, kinds = report.tables
    assert [row["method"] for row in whole.rows] == 3 * NAMES
    assert {row["decoding"] for row in whole.rows} == model.DECODINGS.keys()
    for row in whole.rows:
        assert row["rate"] > 0
        if "lookup" not in row["method"] or row["decoding"] == "greedy":
            assert (row["same"], row["same_as_kernels"]) == ("2 of 2", "2 of 2")
    greedy = {row["method"]: row for row in whole.rows[: len(NAMES)]}
    assert greedy["plain"]["plain"] == greedy["plain"]["worst"] == 1
    assert greedy["kernels"]["kernels"] == greedy["kernels"]["worst_kind"] == 1
    for name in ("plain", "kernels", "+ copies", "+ recordings"):
        assert greedy[name]["per_forward"] == 1
    assert [greedy[name]["nodes"] for name in NAMES[:6]] == [None] * 4 + [0, 0]
    assert len(kinds.rows) == 3 * len(NAMES) * len({row["kind"] for row in kinds.rows})
    page = (tables.RESULTS.parent / "README.md").read_text(encoding="utf-8")
    (markers,) = re.findall(r"```markdown\n(.*?)```", page, re.DOTALL)
    markers = markers.replace("model-smollm2-bfloat16", "model-small-float32")
    shown = tables.render(markers, tmp_path)
    assert shown.count("| + copies |") == 2
    assert re.search(r"at temperature 1 <!--.*?-->\d+\.\d\d<!-- end -->", shown)


def run_of(seconds, tokens=4, forwards=4, ids=(1, 2, 3, 4), nodes=None):
    return Run(tokens, forwards, seconds, torch.tensor([ids]), nodes, {})


def test_figures_are_medians_and_geometric_means():
    """Ratios of speeds, since texts may differ in their lengths."""
    turns = [
        model.Turns(
            Prompt(kind, "", ""),
            {
                "plain": [run_of(4.0), run_of(400.0), run_of(4.0)],
                "kernels": [run_of(2.0)] * 3,
                "+ drafts": [run_of(seconds, 8, 2, ids=range(8), nodes=6)] * 3,
            },
        )
        for kind, seconds in (("a", 4.0), ("b", 1.0), ("b", 4.0))
    ]
    found = model.summary(turns, "+ drafts")
    assert found["plain"] == near((2 * 8 * 2) ** (1 / 3))
    assert found["kernels"] == near((1 * 4 * 1) ** (1 / 3))
    assert (found["worst"], found["worst_of_kernels"], found["worst_kind"]) == (2, 1, 1)
    assert (found["rate"], found["per_forward"], found["nodes"]) == (24 / 9, 4, 3)
    assert found["same"] == found["same_as_kernels"] == "0 of 3"
    assert model.summary(turns, "kernels")["same"] == "3 of 3"
    assert dict(model.by_kind(turns, "+ drafts", "kernels")) == {"a": [1], "b": [4, 1]}


def test_methods_take_turns_from_another_first():
    order = []
    calls = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    seconds, results = timing.alternate(calls, 3, silent)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": 5, "b": 6}
    assert seconds.keys() == {"a", "b"}
    order.clear()
    calls = {name: lambda prompt, name=name: order.append(name) for name in "abc"}
    begun = []
    model.take_turns(["p", "q"], calls, 2, silent, lambda: begun.append(len(order)))
    assert "".join(order) == "abcbcabcacab"
    assert begun == [0, 6]


def test_an_assistant_has_answered_the_prompts_before_and_is_new_in_every_repeat():
    loaded, tokenizer = small_model()
    before = [Prompt("", "", text) for text in ("one two", "three four", "five")]
    compared = model.Compared(loaded, tokenizer, before, {"max_new_tokens": 2}, 0)
    known = []
    for _ in range(2):
        compared.begin()
        known.append(compared._known)
        assert known[-1].stats.total.calls == 3
    assert known[0] is not known[1]
    compared.calls[NAMES[-1]](before[0])
    compared.calls["+ drafts"](before[0])
    assert known[1].stats.total.calls == 4


def test_a_busy_machine_is_waited_for(monkeypatch):
    loads = iter([3.0, 0.9, 0.4])
    monkeypatch.setattr(model.os, "getloadavg", lambda: (next(loads), 0, 0))
    monkeypatch.setattr(model.time, "sleep", lambda seconds: None)
    said = []
    model.await_quiet(60, said.append)
    assert [text.split()[3] for text in said] == ["3.00:", "0.90:"]
    monkeypatch.setattr(model.os, "getloadavg", lambda: (2.0, 0, 0))
    monkeypatch.setattr(model, "PATIENCE", 0)
    with pytest.raises(SystemExit, match=r"load of at most 0\.5, got 2\.00"):
        model.run(parse(["model"]), silent)


NODE = """#!{python}
import json, sys
print(json.dumps({{"description": " ".join(sys.argv[2:])}}), flush=True)
for line in sys.stdin:
    prompt, new_tokens = json.loads(line)
    if not prompt:
        sys.exit(3)
    answer = {{"ids": [len(prompt)] * new_tokens, "first": 0.2, "seconds": 0.5}}
    print(json.dumps(answer), flush=True)
"""


def test_llama_cpp_runs_beside_in_a_process_of_its_own(tmp_path, monkeypatch):
    node = tmp_path / "node"
    node.write_text(NODE.format(python=sys.executable))
    node.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "file").write_bytes(bytes(7))
    engine = llama_engine.NodeLlama(tmp_path, tmp_path / "file", 3)
    assert engine.nbytes == 7
    assert engine.description == f"{tmp_path / 'file'} 3 {llama_engine.SLOTS}"
    run = engine.generate([5, 6], 4)
    assert run.ids.tolist() == [[2] * 4]
    assert (run.tokens, run.forwards, run.seconds, run.split) == (4, 4, 0.5, {"prefill": 0.2})
    with pytest.raises(RuntimeError, match="expected an answer, it ended with 3"):
        engine.generate([], 4)


@pytest.mark.demo
@pytest.mark.parametrize("kind", llama_engine.FILE_TYPES)
def test_llama_cpp_is_given_the_models_weights(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    try:
        llama_engine.write_gguf(path, kind, "smollm2")
    except ImportError as error:
        pytest.skip(str(error))
    assert [*tmp_path.iterdir()] == [path]
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.file_type"].contents() == llama_engine.FILE_TYPES[kind]
    (table,) = [one for one in reader.tensors if one.name == "token_embd.weight"]
    values = torch.tensor(gguf.quants.dequantize(table.data, table.tensor_type))
    dtype = torch.float32 if kind == "Q8_0" else getattr(torch, kind)
    weight = (
        load_demo_model("smollm2", dtype=dtype)[0].get_input_embeddings().weight.detach().float()
    )
    if kind == "Q8_0":  # steps of 127 to the largest of 32, and half a step off, but for rounding
        steps = weight.view(-1, 32).abs().amax(dim=1, keepdim=True) / 127
        assert ((values - weight).view(-1, 32).abs() <= 0.6 * steps + 1e-4).all()
    else:
        assert torch.equal(values.to(torch.bfloat16), weight.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_model_whose_columns_are_shifted_computes_the_same(kind):
    """All that is read of a hidden state, or of neurons, is moved with it."""
    model = build(kind, tie_word_embeddings=kind[0] == "G")
    with torch.no_grad():
        expected, before = model(PROMPT).logits, model.lm_head.weight.clone()
        inputs.shift(model)
        assert torch.equal(model.lm_head.weight, before.roll(inputs.SHIFT, 1))
        torch.testing.assert_close(model(PROMPT).logits, expected, rtol=1e-4, atol=1e-4)
