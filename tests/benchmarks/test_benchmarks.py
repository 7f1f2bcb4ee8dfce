"""Every benchmark at tiny size: it runs, and what it prints adds up. Timings are not looked at."""

import copy
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from benchmarks import (
    accelerator,
    acceptance,
    batches,
    datastore,
    forced,
    forwards,
    inputs,
    propose,
    record,
    replay,
    requests,
    structures,
    texts,
    traces,
)
from benchmarks.__main__ import BENCHMARKS, main, parse
from benchmarks.report import Report
from hf_retrieval_assist.simulation import simulate

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<pad>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory):
    """Requests whose outputs copy from their prompts and from each other."""
    folder = tmp_path_factory.mktemp("traces")
    rng = np.random.default_rng(0)
    phrase = rng.integers(0, 50, 24).astype(np.int32)
    requests = [
        (np.concatenate([rng.integers(0, 50, 12).astype(np.int32), phrase]), np.tile(phrase, 3))
        for _ in range(4)
    ]
    corpus = [rng.integers(0, 50, 40).astype(np.int32), phrase]
    traces.write_npz(folder / "phrases.npz", traces.Trace("phrases", requests, corpus))
    return folder


@pytest.fixture(scope="module")
def structures_report():
    return structures.run(arguments("structures", "--max-tokens", 1000), silent)


@pytest.fixture(scope="module")
def acceptance_report(trace_folder):
    return acceptance.run(arguments("acceptance", "--traces", trace_folder), silent)


@pytest.fixture(scope="module")
def replay_report(trace_folder):
    options = ("--replay-traces", trace_folder, "--device", "cpu", "--repeats", 1)
    return replay.run(arguments("replay", *options, "--batch", 1, 3, "--new-tokens", 12), silent)


def silent(text):
    pass


def arguments(*argv):
    return parse(["--quick", *map(str, argv)])


def rows(report, title):
    (table,) = [table for table in report.tables if table.title.startswith(title)]
    return table.rows


def test_structures(structures_report, tmp_path):
    found = rows(structures_report, "Structures")
    names = {row["structure"] for row in found}
    assert {"suffix automaton", "suffix tree", "suffix array", "prompt lookup"} <= names
    assert {row["text"] for row in found} == {"natural", "recorded", *texts.HARD}
    automaton = [row for row in found if row["structure"] == "suffix automaton"]
    assert all(row["build"] > 0 and row["draft"] > 0 and row["bytes"] > 0 for row in automaton)
    passed = rows(structures_report, "Outputs through a memory of at most 0.25 MiB")
    assert [row["tokens"] for row in passed] == list(range(100, 1001, 100))
    assert all(0 < row["largest"] <= 0.25 and row["speed"] > 0 for row in passed)
    content = json.loads(structures_report.save(tmp_path).read_text())
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert content["settings"]["seed"] == 0
    assert len(content["tables"][0]["rows"]) == len(found)


def test_propose(trace_folder):
    """Texts side by side are drafted alike whether caches are warm or not."""
    rows = ("--propose-rows", "1", "3", "--quick")
    report = propose.run(arguments("propose", "--traces", trace_folder, *rows), silent)
    found = {(row["rows"], row["caches"]): row for row in report.tables[0].rows}
    assert set(found) == {(1, "warm"), (1, "cold"), (3, "warm"), (3, "cold")}
    for rows in (1, 3):
        assert found[rows, "warm"]["drafts"] == found[rows, "cold"]["drafts"]
        assert found[rows, "warm"]["tokens"] >= 1
        assert 0 < found[rows, "warm"]["median"] <= found[rows, "warm"]["p99"]


def test_batches(trace_folder):
    report = batches.run(arguments("batches", "--traces", trace_folder), silent)
    (table,) = report.tables
    assert len(table.rows) == 4
    for padded, packed in zip(table.rows[::2], table.rows[1::2], strict=True):
        assert (padded["layout"], packed["layout"]) == ("padded", "packed")
        assert padded["plain_forwards"] == packed["plain_forwards"] == 71
        assert packed["forwards"] < 71


def test_datastore(trace_folder):
    options = arguments("datastore", "--corpora", trace_folder, "--tokens", 500)
    report = datastore.run(options, silent)
    (store,) = rows(report, "Datastore")
    assert (store["tokens"], store["shards"]) == (500, 1)
    assert all(store[key] > 0 for key in ("build", "bytes", "open"))
    asked = rows(report, "A step")
    assert {(row["search"], row["caches"]) for row in asked} == {
        (search, caches) for search in datastore.SEARCHES for caches in ("warm", "emptied")
    }
    assert all(row["p99"] >= row["p50"] > 0 for row in asked)
    by_search = {row["search"]: row["nodes"] for row in asked if row["caches"] == "warm"}
    assert by_search["incremental"] == by_search["from scratch"] > 0


def test_perturbed_text_is_real_at_first_and_as_long_as_asked():
    documents = [np.arange(30, dtype=np.int32), np.arange(30, 50, dtype=np.int32)]
    once = datastore.perturbed(documents, 50, seed=0)
    assert sorted(d.tolist() for d in once) == [d.tolist() for d in documents]
    often = np.concatenate(datastore.perturbed(documents, 1010, seed=0))
    assert len(often) == 1010
    same = np.isin(often, np.arange(50)).mean()
    assert 0.9 < same < 1
    kept, asked = datastore.hold_out(documents, seed=0)
    assert len(kept) == 1
    assert not np.isin(asked, kept[0]).any()


def test_streams_are_what_they_are_called():
    assert len(set(texts.repeated(50).tolist())) == 1
    assert texts.fibonacci(8).tolist() == [0, 1, 0, 0, 1, 0, 1, 0]
    bits = texts.de_bruijn(2**6, order=6)
    around = np.concatenate([bits, bits[:5]])
    assert len({tuple(around[i : i + 6].tolist()) for i in range(2**6)}) == 2**6
    text = texts.natural(5000, 1000, seed=1)
    assert np.array_equal(text, texts.natural(5000, 1000, seed=1))
    assert 0 <= text.min() < text.max() < 1000


def test_acceptance(acceptance_report):
    presets = {row["variant"]: row for row in rows(acceptance_report, "Presets")}
    assert presets["SamAssistant"]["accepted"] > 2
    assert presets["SamAssistant"]["accepted"] >= presets["prompt lookup"]["accepted"]
    assert presets["prompt lookup"]["nodes"] <= 10
    assert {"SamAssistant, corpus", "RestAssistant"} <= presets.keys()
    assert presets["SamAssistant"]["gpu"] > presets["SamAssistant"]["cpu"] > 0
    for study in acceptance.STUDIES.values():
        assert rows(acceptance_report, study.title)


def test_prompt_lookup_is_counted_as_transformers_drafts(trace_folder):
    """Ten tokens a step while the phrase repeats, as the outputs were made to."""
    (trace,) = traces.read_traces(trace_folder)
    found = simulate(acceptance.variants.prompt_lookup(), trace.requests, vocab_size=50)
    assert 5 < found.mean_accepted_tokens <= 11


def test_sequoia_beats_chains_of_the_same_size(acceptance_report):
    found = rows(acceptance_report, "Sequoia")
    assert {row["nodes"] for row in found} == set(acceptance.TREE_SIZES)
    assert all(row["tree"] >= row["chains"] - 1e-9 >= row["chain"] - 1e-9 for row in found)
    assert acceptance.chain_tokens([0.5, 0.25], 1, 2) == 1 + 0.5 + 0.25
    assert acceptance.chain_tokens([0.5, 0.25], 2, 2) == 1 + 0.5 + 0.25


def test_curves_of_t():
    for time in (acceptance.gpu_time, acceptance.cpu_time):
        assert time(1) == 1
        assert time(65) > time(64) > 1


def test_traces_round_trip_and_are_checked(tmp_path, trace_folder, tokenizer):
    (trace,) = traces.read_traces(trace_folder)
    assert (len(trace.requests), len(trace.corpus), trace.vocab_size) == (4, 2, 50)
    assert len(trace.head(2).requests) == 2
    lines = [{"prompt": "w1 w2", "output": "w3"}, {"corpus": "w4 w5 w6"}]
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (text,) = traces.read_traces(folder, tokenizer)
    assert [ids.tolist() for ids in text.requests[0]] == [[3, 4], [5]]
    assert text.corpus[0].tolist() == [6, 7, 8]
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


def test_replay_emits_the_recorded_text_by_every_method(replay_report):
    found = rows(replay_report, "Replaying")
    assert {row["same"] for row in found} == {"yes"}
    assert {row["batch"] for row in found} == {1, 3}
    by_method = {row["method"]: row for row in found if row["batch"] == 1}
    assert by_method["plain"]["steps"] == 12
    assert by_method["prompt lookup"]["steps"] < 8
    assert by_method["draft model"]["steps"] < 12
    assert by_method["SamAssistant"]["steps"] <= 12
    assert all(row["step"] > 0 for row in found)
    assert by_method["SamAssistant"]["forward"] > 0
    assert "forward" not in by_method["plain"]
    assert replay_report.settings["weight_bytes"] > 0


def test_forcing_tells_rows_and_positions_apart():
    small = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=90,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    recorded = torch.tensor([[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 0, 0]])
    inputs = torch.tensor([[1, 2, 3], [0, 11, 12]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    with forced.forcing(small, recorded):
        ids = small.generate(inputs, attention_mask=mask, max_new_tokens=2, pad_token_id=0)
        assert ids[:, 3:].tolist() == [[4, 5], [13, 14]]
        tree = small(torch.tensor([[3, 4, 80, 81]]), position_ids=torch.tensor([[2, 3, 3, 4]]))
        assert tree.logits.argmax(-1)[0].tolist() == [4, 5, 5, 6]
        with pytest.raises(RuntimeError, match="position_ids"):
            small(inputs)
    plain = small(inputs, attention_mask=mask).logits
    assert plain.max() < forced.FORCE


@pytest.fixture(scope="module")
def accelerator_report(trace_folder):
    options = ("--replay-traces", trace_folder, "--device", "cpu", "--repeats", 1, "--steps", 12)
    return accelerator.run(
        arguments("accelerator", *options, "--rows", 1, 2, "--widths", 4), silent
    )


def test_steps_beside_the_bytes_they_read(accelerator_report):
    found = rows(accelerator_report, "Recorded text")
    assert {row["same"] for row in found} == {"yes"}
    assert {row["batch"] for row in found} == {1, 2}
    by_method = {row["method"]: row for row in found if row["batch"] == 1}
    plain = {"plain", "plain, static and compiled"}
    ours = {f"ours, {how}{kind}" for how in ("eager", "compiled") for kind in ("", ", chains")}
    assert by_method.keys() == {*plain, *ours, "prompt lookup"}
    assert all(by_method[name]["per_forward"] == 1 for name in plain)
    assert by_method["prompt lookup"]["per_forward"] > 1
    assert all(row["roofline"] > 0 and row["first"] > 0 for row in found)
    equal = rows(accelerator_report, "Steps at equal width")
    assert {(row["shape"], row["width"]) for row in equal} == {("chain", 4), ("tree", 4)}
    assert accelerator_report.settings["backend"] == "eager"
    assert "sdpa" in accelerator_report.settings


def test_prompts_of_a_setting_differ_from_call_to_call(trace_folder):
    (trace,) = traces.read_traces(trace_folder)
    cpu = torch.device("cpu")
    setting = accelerator.prompts_of(trace, 90, 2, 12, 4, seed=0, device=cpu)
    lengths = [prompt.shape[1] for prompt, _ in setting.prompts]
    assert lengths[0] == 90
    assert max(lengths[1:]) < 90
    assert all(following.shape == (2, 12) for _, following in setting.prompts)
    assert not torch.equal(setting.prompts[1][0][:, :40], setting.prompts[2][0][:, :40])
    outputs = {tuple(output[:12].tolist()) for _, output in trace.requests}
    assert {tuple(row) for row in setting.prompts[3][1].tolist()} <= outputs
    with pytest.raises(ValueError, match="100 tokens or more"):
        accelerator.prompts_of(trace, 90, 1, 100, 1, seed=0, device=cpu)


def test_bytes_that_a_step_reads():
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert accelerator.token_bytes(model) == 2 * 3 * 2 * 4 * 2
    parameters = sum(p.numel() for p in model.parameters())
    assert accelerator.weight_bytes(model) == 2 * (parameters - 90 * 16)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert accelerator.weight_bytes(model) == 2 * (parameters - 90 * 16)


def test_dense_ids_keep_what_is_equal(trace_folder):
    (trace,) = traces.read_traces(trace_folder)
    far = traces.Trace("far", [(p * 1000, o * 1000) for p, o in trace.requests])
    near = replay.dense_ids(far, 50)
    assert near.vocab_size <= 50
    values = np.unique(np.concatenate([ids for pair in far.requests for ids in pair]))
    assert all(
        np.array_equal(values[mine], theirs)
        for mine, theirs in zip(near.requests[0], far.requests[0], strict=True)
    )
    with pytest.raises(ValueError, match="distinct"):
        replay.dense_ids(far, 10)


@pytest.fixture(scope="module")
def small_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=62,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("context", [0, 9])
def test_cost_of_forwards(small_model, context):
    options = arguments("forwards", "--context", context)
    report = forwards.measure({"float32": small_model}, options, silent)
    found = rows(report, "A forward")
    assert [row["tokens"] for row in found] == 2 * [1, 2, 4]
    assert {row["variant"] for row in found} == {"float32, PyTorch's", "float32, ours"}
    assert all(row["ms"] > 0 for row in found)
    assert [row["ratio"] for row in found if row["tokens"] == 1] == [1, 1]
    cache = forwards.filled_cache(small_model, context)
    forwards.forward_seconds(small_model, cache, True, [1, 2])
    assert cache.get_seq_length() == context


def test_samples_of_a_prompt_are_independent_and_end(small_model):
    prompt = torch.tensor([[2, 3, 4, 5]])
    samples = list(record.sample(small_model, prompt, samples=3, new_tokens=12, seed=0))
    assert len(samples) == 3
    assert len({tuple(ids.tolist()) for ids in samples}) == 3
    assert all(ids.dtype == np.int32 and 1 <= len(ids) <= 12 for ids in samples)
    again = record.sample(small_model, prompt, samples=3, new_tokens=12, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(samples, again, strict=True))


def test_shipped_prompts_cover_their_kinds():
    for folder, kinds in ((inputs.PROMPTS, 7), (inputs.UNTUNED, 13)):
        prompts = inputs.read_prompts(folder)
        counts = Counter(prompt.category for prompt in prompts)
        assert counts == dict.fromkeys(counts, 3)
        assert len(counts) == kinds
        assert len({p.text for p in prompts} | {p.name for p in prompts}) == 2 * len(prompts)
        assert [len(inputs.first_of_each(prompts, n)) for n in (1, 2, 9)] == [
            kinds,
            2 * kinds,
            3 * kinds,
        ]
    assert all(prompt.message for prompt in inputs.read_prompts(inputs.UNTUNED))


def test_a_prompt_is_a_message_where_there_is_a_template(tokenizer):
    prompt = inputs.Prompt("kind", "name", "w1 w2", "w3")
    assert prompt.inputs(tokenizer)["input_ids"].tolist() == [[3, 4]]
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = "{% for m in messages %}w9 {{ m.content }}{% endfor %}"
    assert prompt.inputs(chatting)["input_ids"].tolist() == [[11, 5]]
    assert replace(prompt, message="").inputs(chatting)["input_ids"].tolist() == [[11, 3, 4]]


def test_models_are_taken_by_name_or_from_a_folder(small_model, tokenizer, tmp_path, monkeypatch):
    small_model.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    monkeypatch.setattr(inputs, "load_demo_model", lambda dtype, name: (dtype, name))
    assert inputs.load(parse(["--model", "smollm2"])) == (None, "smollm2")
    assert inputs.load(parse([]), "bfloat16") == (torch.bfloat16, "gemma3")
    options = parse(["--model", str(tmp_path / "own"), "--dtype", "bfloat16"])
    model, _ = inputs.load(options)
    assert inputs.dtype_name(model) == "bfloat16"
    assert inputs.model_name(options) == "own"


def test_requests_side_by_side(small_model):
    prompts = [[2, 3, 4, 2, 3], [5, 6, 7]]
    found = requests.measure(small_model, prompts, 2, 8, 1, silent)
    assert [row["method"] for row in found][:2] == ["plain", "plain in reroute"]
    assert len(found) == 4
    assert {row["same"] for row in found} == {"2 of 2"}
    assert all(row["rate"] > 0 for row in found)


def test_shipped_traces_are_there():
    assert all(len(trace.requests) >= 16 for trace in traces.read_traces(traces.SHIPPED))


def test_command_line(tmp_path, trace_folder, capsys):
    folders = ["--traces", str(trace_folder), "--output", str(tmp_path)]
    main(["acceptance", "--quick", "--study", "sam", *folders])
    assert "SAM-Decoding: what" in capsys.readouterr().out
    assert json.loads((tmp_path / "acceptance.json").read_text())["benchmark"] == "acceptance"
    with pytest.raises(SystemExit):
        parse(["speed"])


def test_a_benchmark_keeps_what_it_fills_in_to_itself(tmp_path, monkeypatch):
    def fill_in(arguments, progress):
        assert arguments.dtype is None
        arguments.dtype = "float64"
        return Report("x", {})

    for name in ("step", "model"):
        monkeypatch.setattr(BENCHMARKS[name], "run", fill_in)
    main(["step", "model", "--output", str(tmp_path)])
