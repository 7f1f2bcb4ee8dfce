"""Environments that the package cannot work in are told so."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.corpus.readers import read_texts
from hf_retrieval_assist.extensions.redis.stream import OutputStream
from hf_retrieval_assist.system import versions

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def with_versions(monkeypatch, **found):
    def version(name):
        if found.get(name) is None:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"torch": "2.5.1", "transformers": "5.23.0"}, "torch: .* 2.6 or newer, got 2.5.1"),
        ({"torch": "2.13.0+cpu", "transformers": "4.57.1"}, "transformers: .* got 4.57.1"),
        ({"torch": "2.6.0"}, "transformers: .* got none"),
    ],
)
def test_too_old_or_missing(monkeypatch, found, message):
    with_versions(monkeypatch, **found)
    with pytest.raises(ImportError, match=message):
        versions.require_supported_versions()


def test_the_package_asks_for_the_same_versions():
    for name, oldest in versions.OLDEST.items():
        assert re.search(rf'"{name}>={re.escape(oldest)}"', PYPROJECT)


EXTRAS = {
    "pydivsufsort": (lambda: Datastore.build([[1]], "store", vocab_size=300), "pydivsufsort"),
    "redis": (lambda: OutputStream("redis://localhost", 1), "redis"),
    "datasets": (lambda: [*read_texts(["a.parquet"])], "datasets"),
}


@pytest.mark.parametrize("missing", EXTRAS)
def test_a_missing_extra_says_what_to_install(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    use, packages = EXTRAS[missing]
    with pytest.raises(ImportError, match=f"pip install .?{packages}"):
        use()


def test_the_first_name_that_is_used_says_it():
    code = (
        "import importlib.metadata as m; old = m.version;"
        "m.version = lambda name: '4.57.1' if name == 'transformers' else old(name);"
        "import hf_retrieval_assist; hf_retrieval_assist.SamAssistant"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: transformers: hf_retrieval_assist expected" in done.stderr


def test_a_source_tree_that_is_not_compiled_says_what_to_run(tmp_path):
    package = Path(versions.__file__).parents[1]
    sources = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(package, tmp_path / package.name, ignore=sources)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import hf_retrieval_assist"
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert "pip install --editable ." in done.stderr.splitlines()[-1]
