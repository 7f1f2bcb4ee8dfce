"""Modules that are loaded again in a running process: calls go on, plainly where parts of the
package no longer fit together."""

import subprocess
import sys

import pytest

from hf_retrieval_assist.system.reloads import Loaded, is_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks are POSIX's")

# One of each kind: what holds the wrapper, what is checked for its class, what others exchange, and
# what is called in every step.
SOME = [
    *("hook", "assistants", "attachment", "drafting.policy", "system.reloads"),
    *("kernels.scopes", "decoding.call"),
]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([f"hf_retrieval_assist.{name}" for name in SOME], id="some"),
        pytest.param([], id="every", marks=pytest.mark.slow),
    ],
)
def test_calls_go_on_after_modules_were_loaded_again(names):
    command = [sys.executable, "-m", "tests.system.reloading_process", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = int(done.stdout.split()[0])
    assert cases == 3 * (len(names) + 2) if names else cases > 400


@pytest.fixture
def module(monkeypatch):
    """Makes a module of the package that can be loaded again."""
    name = "hf_retrieval_assist.made_here"

    def load(spec):
        made = type(sys)(name)
        made.__spec__ = spec
        monkeypatch.setitem(sys.modules, name, made)

    return load


def test_a_module_that_was_loaded_again_is_named(module):
    first, second = object(), object()
    module(first)
    loaded = Loaded()
    assert loaded.why_stale() is None
    module(None)
    assert loaded.why_stale() is None
    module(second)
    assert "hf_retrieval_assist.made_here was loaded anew" in loaded.why_stale()
    assert Loaded().why_stale() is None


def test_classes_are_known_by_their_names():
    kind, again = (type("Kind", (), {"__module__": "here"}) for _ in range(2))
    below = type("Below", (again,), {})
    assert is_of(kind, below())
    assert is_of(kind, kind())
    assert not is_of(below, kind())
    assert not is_of(kind, None)
