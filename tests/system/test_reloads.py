"""Modules that are loaded again in a running process: calls go on, plainly where parts of the
package no longer fit together."""

import importlib
import pkgutil
import sys
from functools import partial

import pytest
import torch

import hf_retrieval_assist
from hf_retrieval_assist import SamAssistant
from tests.support.forks import in_child
from tests.support.lossless import build, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="forks are POSIX's"),
]

PACKAGE = "hf_retrieval_assist"
# One of each kind: what holds the wrapper, what is checked for its class, what others exchange, and
# what is called in every step.
SOME = [
    *("hook", "assistants", "attachment", "policy.policy", "system.reloads"),
    *("host.scopes", "decoding.call"),
]


def imported():
    """The names of the modules that are no compiled ones and can be imported here."""
    for info in pkgutil.walk_packages(hf_retrieval_assist.__path__, f"{PACKAGE}."):
        if not info.name.endswith("__main__"):
            try:
                module = importlib.import_module(info.name)
            except ImportError:  # an extra is missing
                continue
            if module.__file__.endswith(".py"):
                yield info.name


def reloaded(*names):
    for name in names:
        importlib.reload(sys.modules[name])


def cleared(*names):
    """Clear modules the way that IPython's autoreload does."""
    for name in names:
        module = sys.modules[name]
        loader = module.__loader__
        vars(module).clear()
        vars(module).update(__name__=name, __loader__=loader)
        importlib.reload(module)


def imported_again(*names):
    for name in names:
        del sys.modules[name]
    for name in names:
        importlib.import_module(name)


class Calls:
    """Calls of two models, to one of which an assistant is attached."""

    def __init__(self):
        self.model, self.attached, self.old = build(), build(), SamAssistant()
        hf_retrieval_assist.attach(self.attached, SamAssistant())
        self.plain = run(self.model)
        self.same(assistant=self.old)
        assert torch.equal(self.plain, run(self.attached))

    def same(self, **options):
        assert torch.equal(self.plain, run(self.model, **options))

    def check_after(self, again, names):
        """When these were loaded again: only a package that is new as a whole drafts."""
        again(*names)
        serves = again is imported_again and len(names) > 1
        package, presets = map(importlib.import_module, (PACKAGE, f"{PACKAGE}.presets"))
        new = presets.SamAssistant()
        for assistant in (None, self.old, new):
            self.same(assistant=assistant)
        self.same(custom_generate=self.old)
        assert torch.equal(self.plain, run(self.attached))
        package.attach(self.model, new)
        self.same()
        package.detach(self.model)
        package.uninstall()
        with pytest.raises((TypeError, ValueError), match="assistant"):
            run(self.model, assistant=new)
        for options in ({}, {"custom_generate": self.old}, {"custom_generate": new}):
            self.same(**options)
        package.install()
        self.same(assistant=new)
        assert (new.stats.last.tier != "plain") is serves


@pytest.mark.parametrize("every", [False, True], ids=["some", "every"])
@pytest.mark.parametrize("again", [reloaded, cleared, imported_again])
def test_calls_go_on_after_modules_were_loaded_again(again, every):
    calls, names = Calls(), [*imported()]
    chosen = names if every else [f"{PACKAGE}.{name}" for name in SOME]
    cases = [*((name,) for name in chosen), tuple(names), tuple(reversed(names))]
    works = [partial(calls.check_after, again, case) for case in cases]
    assert [case for case, work in zip(cases, works, strict=True) if in_child(work)] == []
