"""Directories that may not be written to: reading goes on, the rest is one clear error."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hf_retrieval_assist import Datastore, OutputMemory, SamAssistant
from tests.support.documents import contents
from tests.support.lossless import run

pytestmark = pytest.mark.skipif(not hasattr(os, "seteuid"), reason="modes are POSIX's")

NOBODY = 65534


@pytest.fixture
def folder():
    # Not pytest's own, which only its user may enter.
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for inner in (path, *path.rglob("*")):
        inner.chmod(0o755)
    shutil.rmtree(path)


@contextmanager
def read_only(folder):
    """A scope in which this process may read a folder, but not write to it."""
    directories = [folder, *(inner for inner in folder.rglob("*") if inner.is_dir())]
    for directory in directories:
        directory.chmod(0o555)
    root = os.geteuid() == 0
    if root:  # whom modes do not stop
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for directory in directories:
            directory.chmod(0o755)


def test_a_log_of_outputs(folder):
    with read_only(folder), pytest.raises(OSError, match=str(folder)):
        OutputMemory(path=folder / "log")
    assert not list(folder.iterdir())


def test_a_datastore(model, plain, folder):
    path, documents = folder / "store", [plain[0].tolist()]
    options = {"vocab_size": model.config.vocab_size, "progress": False}
    with read_only(folder), pytest.raises(OSError, match="store"):
        Datastore.build(documents, path, **options)
    assert not list(folder.iterdir())
    Datastore.build(documents, path, **options)
    stored = contents(path)
    with read_only(folder):
        store = Datastore.open(path)
        assistant = SamAssistant(store, budget=8)
        assert torch.equal(plain, run(model, assistant=assistant))
        assert assistant.stats.last.accepted > 0
        with pytest.raises(OSError, match="store"):
            store.append(documents, progress=False)
    assert contents(path) == stored
