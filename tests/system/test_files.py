"""Files: replacement in one step, the cache directory, JSON lines."""

import errno
import os
import re
import stat
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hf_retrieval_assist import Datastore, SamAssistant
from hf_retrieval_assist.system import files
from hf_retrieval_assist.system.files import replacing
from hf_retrieval_assist.tools import demo_model
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.lossless import run


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


@pytest.fixture
def failing(monkeypatch):
    """Lets `os.fsync` fail of folders, or of files."""

    def fail(number, folders):
        kept = os.fsync

        def fsync(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
                raise OSError(number, os.strerror(number))
            kept(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    return fail


def changes(folder):
    """Everything that is synced."""
    store = Datastore.build([NamedIds("a", [1])], folder / "store", vocab_size=9, progress=False)
    assert store.append([NamedIds("b", [2])], progress=False).token_count == 2
    with replacing(folder / "file") as fresh:
        fresh.write_text("whole")


@pytest.mark.parametrize("number", ["EINVAL", "ENOTSUP", "ENOSYS", "EBADF", "EPERM", "EACCES"])
def test_folders_that_cannot_be_synced_are_no_hindrance(tmp_path, failing, number):
    failing(getattr(errno, number), folders=True)
    changes(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("folders", [True, False])
def test_what_a_disk_loses_is_an_error_that_names_the_place(tmp_path, failing, number, folders):
    failing(number, folders)
    with pytest.raises(OSError, match=re.escape(f"{os.strerror(number)}: '{tmp_path}")) as caught:
        changes(tmp_path)
    assert caught.value.errno == number


def test_a_block_that_cannot_write_names_the_file_that_it_was_to_replace(tmp_path):
    said = re.escape(f"No space left on device: '{tmp_path / 'file'}'")
    with pytest.raises(OSError, match=said), replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("system", "given", "folder"),
    [
        ("linux", "", "{home}/.cache"),
        ("linux", "{home}/elsewhere", "{home}/elsewhere"),
        ("linux", "elsewhere", "{home}/.cache"),
        ("darwin", "", "{home}/Library/Caches"),
        ("win32", "", "{home}/AppData/Local"),
    ],
)
def test_the_directory_is_the_systems_or_the_users_choice(
    system, given, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", given.format(home=tmp_path))
    expected = Path(folder.format(home=tmp_path), "hf_retrieval_assist")
    assert files.user_cache_directory() == expected


@pytest.fixture(params=[{}, {"HOME": ""}, {"HOME": "here", "XDG_CACHE_HOME": "here"}], ids=str)
def no_home(request, monkeypatch, tmp_path):
    """A user without an entry among the system's, as `docker run --user 54321` makes one."""
    pwd = pytest.importorskip("pwd")

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    files._tell_of_no_home.cache_clear()
    yield tmp_path
    files._tell_of_no_home.cache_clear()


def test_nothing_needs_a_home(no_home, model):
    plain = run(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(plain, run(model, assistant=SamAssistant()))
    assert not list(no_home.iterdir())


def test_the_demo_is_unpacked_for_a_process_without_a_home(no_home, monkeypatch):
    monkeypatch.setattr(demo_model, "_convert", lambda model, folder: folder.mkdir())
    with pytest.warns(UserWarning, match="set XDG_CACHE_HOME"):
        folder = demo_model.converted_model("smollm2")
    assert folder.is_dir()
    assert folder == demo_model.converted_model("smollm2")
    assert not list(no_home.iterdir())
    demo_model._of_process().cleanup()
    demo_model._of_process.cache_clear()
