"""Files: replacement in one step, the cache directory, JSON lines."""

from contextlib import suppress

import pytest

from hf_retrieval_assist.system import files
from hf_retrieval_assist.system.files import read_json_lines, read_kept, replacing


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
    assert [place.rpartition(":")[2] for place in lines] == ["1", "4", "5", "6"]
    assert (lines[f"{path}:1"], lines[f"{path}:6"]) == ({"a": 1}, "last")
    for number in (4, 5):
        assert str(lines[f"{path}:{number}"]).startswith(f"{path}:{number}: expected JSON, got")


def test_what_only_saves_time_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_text('"abcdef"')
    monkeypatch.setattr(files, "_MOST_KEPT", 8)
    assert read_kept(path, "it", str) == "abcdef"
    monkeypatch.setattr(files, "_MOST_KEPT", 7)
    with pytest.warns(UserWarning, match="ignoring it in .*expected at most 7 bytes"):
        assert read_kept(path, "it", str) is None
