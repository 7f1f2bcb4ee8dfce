"""Files: locks between processes, replacement in one step, the cache directory, JSON lines."""

import os
import stat
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from filelock import Timeout

from hf_retrieval_assist.system import files
from hf_retrieval_assist.system.files import BlankLineError, locked, read_json_lines, replacing

HOLDER = """
import sys
from pathlib import Path
from hf_retrieval_assist.system.files import locked

with locked(Path(sys.argv[1]), 10):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """A lock file that another process holds, and the process."""
    path = tmp_path / "lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield path, process
        process.kill()


def test_a_lock_keeps_other_processes_away_until_they_die(held):
    path, process = held
    for patience in (0, 0.2):
        started = time.monotonic()
        with pytest.raises(Timeout), locked(path, patience):
            pass
        assert patience <= time.monotonic() - started < patience + 5
    process.kill()
    with locked(path, 10):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_lock_file_goes_with_the_lock(tmp_path):
    for _ in range(2):
        with locked(tmp_path / "lock", 10):
            assert (tmp_path / "lock").exists()
        assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as fresh:
        fresh.write_text("old")
        assert not path.exists()
    with suppress(KeyError), replacing(path) as fresh:
        fresh.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_a_new_file_has_the_mode_asked_for(tmp_path):
    umask = os.umask(0o027)
    try:
        for mode, expected in ((0o666, 0o640), (0o600, 0o600)):
            with replacing(tmp_path / "file", mode) as fresh:
                fresh.write_text("text")
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected
    finally:
        os.umask(umask)


def test_who_replaces_alone_removes_what_killed_processes_left(tmp_path):
    path, other = tmp_path / "[a]", tmp_path / ".b.0123.new"
    left = tmp_path / ".[a].0123.new"
    for file in (left, other):
        file.write_text("left")
    with replacing(path):
        pass
    assert left.exists()
    with replacing(path, alone=True):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([other, path])


def test_all_parts_keep_their_files_in_one_directory(tmp_path, monkeypatch):
    from hf_retrieval_assist import demo_model
    from hf_retrieval_assist.kernels.tuning import tuning_file
    from hf_retrieval_assist.planning.cost_store import CostModels

    monkeypatch.setattr(files.platformdirs, "user_cache_dir", lambda name: tmp_path / name)
    folder = tmp_path / "hf_retrieval_assist"
    (folder / "gemma-3-270m-f32").mkdir(parents=True)
    places = [tuning_file("linear"), CostModels.user_directory(), demo_model.converted_model()]
    assert {place.parent for place in places} == {folder}


def test_json_lines_have_their_places_and_their_errors(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n  \n[1\n\xff\n"last"')
    lines = dict(read_json_lines(path))
    assert [place.rpartition(":")[2] for place in lines] == ["1", "2", "3", "4", "5", "6"]
    assert all(isinstance(lines[f"{path}:{number}"], BlankLineError) for number in (2, 3))
    assert (lines[f"{path}:1"], lines[f"{path}:6"]) == ({"a": 1}, "last")
    for number in (4, 5):
        assert str(lines[f"{path}:{number}"]).startswith(f"{path}:{number}: expected JSON, got")


def test_waiting_for_a_short_hold_takes_little_more_than_the_hold(held):
    path, process = held
    started = time.monotonic()
    process.stdin.close()
    with locked(path, 10):
        assert time.monotonic() - started < 5
