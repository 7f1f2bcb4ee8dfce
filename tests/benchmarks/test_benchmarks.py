"""Every benchmark at tiny size: it runs, and what it prints adds up. Timings are not looked at."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import accelerator, acceptance, inputs, machine, traces
from benchmarks.__main__ import BENCHMARKS, main
from tests.support.benchmarks import phrases, quick, rows, silent
from tests.support.byte_model import small_model
from tests.support.lossless import build
from tests.support.rounding import near

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory):
    """Requests whose outputs copy from their prompts and from each other."""
    folder = tmp_path_factory.mktemp("traces")
    traces.write_npz(folder / "phrases.npz", phrases("phrases", requests=4))
    return folder


def test_acceptance(trace_folder, tmp_path, capsys):
    options = ["--quick", "--traces", str(trace_folder), "--output", str(tmp_path)]
    main(["acceptance", *options])
    assert "SAM-Decoding: what" in capsys.readouterr().out
    saved = json.loads((tmp_path / "acceptance.json").read_text())
    tables = {table["title"]: table["rows"] for table in saved["tables"]}
    (presets,) = (found for title, found in tables.items() if title.startswith("Presets"))
    presets = {row["variant"]: row for row in presets}
    assert presets["SamAssistant"]["accepted"] >= presets["prompt lookup"]["accepted"] > 1
    assert presets["prompt lookup"]["nodes"] <= 10
    # Sequoia's trees beat chains of the same size.
    (found,) = (found for title, found in tables.items() if title.startswith("Sequoia"))
    assert {row["nodes"] for row in found} == set(acceptance.TREE_SIZES)
    assert all(row["tree"] >= row["chains"] - 1e-9 >= row["chain"] - 1e-9 for row in found)


def test_traces_round_trip_and_are_checked(tmp_path, trace_folder):
    _, tokenizer = small_model()
    (trace,) = traces.read_traces(trace_folder)
    assert (len(trace.requests), len(trace.corpus), trace.vocab_size) == (4, 2, 50)
    assert len(trace.head(2).requests) == 2
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "ab", "output": "c"}\n{"corpus": "def"}')
    (text,) = traces.read_traces(folder, tokenizer)
    decoded = [tokenizer.decode(ids) for ids in (*text.requests[0], *text.corpus)]
    assert decoded == ["ab", "c", "def"]
    with pytest.raises(ValueError, match="tokenizer"):
        traces.read_traces(folder)
    (folder / "a.jsonl").write_text('{"question": "w1"}')
    with pytest.raises(ValueError, match=r"a\.jsonl:1"):
        traces.read_traces(folder, tokenizer)
    with pytest.raises(ValueError, match=r"no \.npz"):
        traces.read_traces(tmp_path / "nowhere")
    np.savez(tmp_path / "b.npz", prompt_tokens=np.arange(3), prompt_offsets=np.array([0, 9]))
    with pytest.raises(ValueError, match="prompt_offsets"):
        traces.read_traces(tmp_path)


def test_forwards_and_steps_beside_the_read_of_weights(tmp_path):
    threads = torch.get_num_threads()
    report = machine.run(quick("machine", "--output", tmp_path), silent)
    ways = [row["gbytes"] for row in rows(report, "What memory gives")]
    products = rows(report, "Products beside")
    assert [row["rows"] for row in products] == [*machine.PRODUCT_ROWS]
    for row in products:
        assert 0 < row["kernel"] == near(row["over"] * max(row["read"], row["arithmetic"]))
    (row,) = rows(report, "Forwards beside")
    assert row["model"] == "tiny"
    assert row["mbytes"] / row["read"] == near(max(ways))
    assert all(row[f"over_{n}"] == near(row[f"rows_{n}"] / row["read"]) for n in (1, 8))
    assert all(row[f"rows_{n}"] > 0 for n in machine.ROWS)  # all of them were repeated
    assert min(row[name] for name in ("products", "first", "first_by_kernels")) > 0
    assert [row["tokens"] for row in rows(report, "A Llama of")] == [1, 4, 16]
    for row in rows(report, "Between"):
        assert (0 < row["nodes"] <= 3) if row["budget"] else row["nodes"] == 0
        assert min(row[name] for name in ("forward", "between", "calls")) > 0
    assert torch.get_num_threads() == threads


def test_bytes_that_a_step_reads():
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build(LlamaForCausalLM, vocab_size=90, hidden_size=16, head_dim=8, **sizes).bfloat16()
    assert accelerator.token_bytes(model) == 2 * 3 * 2 * 8 * 2
    parameters = sum(p.numel() for p in model.parameters())
    assert accelerator.weight_bytes(model) == 2 * (parameters - 90 * 16)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert accelerator.weight_bytes(model) == 2 * (parameters - 90 * 16)


@pytest.mark.parametrize(("folder", "kinds"), [(inputs.PROMPTS, 7), (inputs.UNTUNED, 13)])
def test_shipped_prompts_are_three_of_each_kind(folder, kinds):
    """Traces are shipped, too."""
    prompts = inputs.read_prompts(folder)
    assert [*Counter(prompt.category for prompt in prompts).values()] == [3] * kinds
    assert len({p.text for p in prompts} | {p.name for p in prompts}) == 2 * len(prompts)
    assert [len(inputs.first_of_each(prompts, n)) for n in (1, 9)] == [kinds, 3 * kinds]
    assert all(bool(prompt.message) == (folder == inputs.UNTUNED) for prompt in prompts)
    assert all(len(trace.requests) >= 16 for trace in traces.read_traces(traces.SHIPPED))


COMMANDS = {
    "accelerator": ["--repeats", 1, "--steps", 12, "--rows", 1, 2, "--widths", 4],
    "groups": [],
    "replay": ["--repeats", 1, "--batch", 1, 3, "--new-tokens", 12],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_on_whatever_model_is_named(name, trace_folder, monkeypatch):
    """Its figures are none below 0, and its texts plain decoding's."""
    benchmark, (model, tokenizer) = BENCHMARKS[name], small_model()
    tokenizer.eos_token = "<pad>"
    monkeypatch.setattr(benchmark, "load", lambda *_: (model, tokenizer), raising=False)
    places = ["--traces", trace_folder, "--replay-traces", trace_folder, "--device", "cpu"]
    report = benchmark.run(quick(*places, *COMMANDS[name]), silent)
    assert report.benchmark.startswith(name)
    found = [row for table in report.tables for row in table.rows]
    assert found
    for row in found:
        assert all(figure >= 0 for figure in row.values() if isinstance(figure, int | float))
        same = row.get("same", "yes")
        count, _, of = same.partition(" of ")
        assert same in ("yes", "100%") or count == of
