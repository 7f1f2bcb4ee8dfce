"""The command line: what it prints, what it leaves behind, and its exit codes."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_retrieval_assist
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.system.arguments import byte_count
from hf_retrieval_assist.tools import cli, suggestion
from hf_retrieval_assist.tools.cli import main
from tests.support.byte_model import byte_tokenizer, small_model
from tests.support.documents import contents
from tests.support.lossless import build


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a transformers tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text("import this\n")
    (folder / "b.jsonl").write_text('{"text": "import that"}\n')
    return str(folder)


@pytest.fixture
def store(tmp_path, corpus, tokenizer):
    path = tmp_path / "store"
    assert main(["build", str(path), corpus, "--tokenizer", tokenizer, "--quiet"]) == 0
    return path


def test_append_verify_info(store, corpus, tokenizer, capsys):
    append = ["build", str(store), corpus, "--append", "--tokenizer", tokenizer, "--quiet"]
    assert main([*append, "--memory", "1M", "--workers", "2"]) == 0
    assert "shards      2" in capsys.readouterr().out
    assert main(["verify", str(store)]) == 0
    assert "as they were built" in capsys.readouterr().out
    assert main(["info", str(store), "--documents"]) == 0
    told = capsys.readouterr().out
    assert "documents   4" in told
    assert f"tokenizer   {Path(tokenizer).name} (" in told
    assert told.endswith(f"         24 {corpus}/a.py\n         22 {corpus}/b.jsonl:1\n")
    assert main(["build", str(store), corpus, "--tokenizer", tokenizer]) == 1
    assert "--append adds to it, --overwrite replaces it" in capsys.readouterr().err
    assert Datastore.open(store).count(byte_tokenizer()("import th").input_ids) == 4
    file, *_ = store.glob("*.shard")
    file.write_bytes(file.read_bytes()[::-1])
    assert main(["verify", str(store)]) == 1
    assert "is altered" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["build", "new"], ["build", "store", "--append"]], ids=len)
def test_a_command_that_is_terminated_leaves_no_document(arguments, store, tokenizer, tmp_path):
    before, source = contents(store), tmp_path / "endless.txt"
    os.mkfifo(source)
    arguments = [*arguments, str(source), "--quiet", "--memory", "20k", "--tokenizer", tokenizer]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_retrieval_assist.tools.cli", *arguments],
        **{"cwd": tmp_path, "env": environment},
    )
    Thread(target=write_without_end, args=[source], daemon=True).start()
    while not any(tmp_path.glob(".*.partial/3")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(60) == 143
    source.unlink()
    assert contents(store) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus", "store"]


def write_without_end(path):
    with suppress(OSError), path.open("wb") as pipe:
        while True:
            pipe.write(b"import this and that\n" * 1000)


def test_a_build_tells_what_it_read(store, tmp_path, tokenizer, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "abc"}\n\n{"text": 7}\n{"text": "cab"}\n')
    arguments = ["build", str(tmp_path / "other"), str(rows), "--tokenizer", tokenizer]
    assert main(arguments) == 1
    assert "rows.jsonl:3: expected text in field 'text', got int" in capsys.readouterr().err
    rows.write_text('{"text": "abc"}\n\n{"text": "cab"}\n')
    assert main([*arguments, "--vocab-size", "300"]) == 0
    printed = capsys.readouterr()
    assert "6 tokens read, tokenised and indexed" in printed.out
    assert "vocabulary  300" in printed.out
    assert "indexing" in printed.err
    other = tmp_path / "tokenizer"
    byte_tokenizer(["<pad>"]).save_pretrained(other)
    assert main(["build", str(store), str(rows), "--append", "--tokenizer", str(other)]) == 1
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "missing"], "no datastore at missing"),
        (["build", "new", "{corpus}", "--field", "body"], "expected text in field 'body'"),
        (["build", "new", "{corpus}", "--vocab-size", "0"], "vocab_size: expected 1 to"),
        (["build", "new", "{corpus}", "--workers", "0"], "workers: expected"),
        (["build", "new", "{corpus}", "--memory", "100"], "memory: expected at least"),
        (["build", "new", "{corpus}", "--append"], "no datastore at new"),
        (["build", "new", "datasets:"], "expected a Hub id, file or folder behind"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    arguments, message, corpus, tokenizer, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = [argument.format(corpus=corpus) for argument in arguments]
    if arguments[0] == "build":
        arguments += ["--tokenizer", tokenizer, "--quiet"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["unheard-of"], ["build", "x"], ["info"], ["build", "x", "x", "--memory", "lots"]),
        *(["suggest", "x", "x", "--dtype", name] for name in ("nosuch", "int8", "nn")),
        *(["suggest", "x", "x", "--device", name] for name in ("nosuch", "privateuseone")),
        *(["suggest", "x", "x", "--max-new-tokens", "0"], ["demo", "--max-new-tokens", "x"]),
        ["build", "x", "x", "--tokenizer", "x", "--append", "--overwrite"],
        pytest.param(
            ["demo", "--device", "cuda"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_says_what(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "Error: " in error
    assert arguments[-2:-1] != ["--device"] or "expected a device of PyTorch, got" in error


def test_a_truncated_model_is_one_line(tmp_path, capsys):
    model = build(LlamaForCausalLM, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("some text")
    command = ["suggest", str(tmp_path / "model"), str(tmp_path / "prompts.txt")]
    assert main(command) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-retrieval-assist: error: ")
    assert "expected files of transformers, got SafetensorError" in error
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert main(command) == 1


def test_interruption_exits_with_130(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.models, "_prompts", interrupt)
    assert main(["suggest", "model", "prompts"]) == 130
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(
        f"hf-retrieval-assist {hf_retrieval_assist.__version__}\n"
    )


def test_byte_counts():
    counts = {"123": 123, "2k": 2048, "1.5G": 3 << 29, "4GiB": 4 << 30, "7MB": 7 << 20}
    assert {text: byte_count(text) for text in counts} == counts
    for text in ("", "G", "many", "infG"):
        with pytest.raises(ValueError, match="expected bytes"):
            byte_count(text)


def test_suggest_reads_prompts(tmp_path, monkeypatch, capsys):
    for made in small_model():
        made.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("one two\n\nthree\n\n\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    monkeypatch.setattr(suggestion, "suggest", lambda *given, **named: (*given[1:], named))
    for name in ("a.txt", "a.jsonl"):
        command = ["suggest", str(tmp_path / "model"), str(tmp_path / name), "--repeats", "2"]
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "['one two', 'three']" in said
        assert "'repeats': 2" in said
        assert "'max_new_tokens': 64" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "found none"),
        ('\n{"text": "one"}', "a.jsonl:2: expected text in field 'prompt'"),
    ],
)
def test_a_damaged_prompt_is_named(content, message, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(content)
    assert main(["suggest", "model", str(tmp_path / "a.jsonl")]) == 1
    assert message in capsys.readouterr().err
