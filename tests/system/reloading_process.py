"""Loads modules of the package again, each time in a fork of this process, and calls `generate`.

    python -m tests.system.reloading_process [name of a module ...]

All modules without names. Prints what went wrong in which case, and how many cases there were.
"""

import importlib
import os
import pkgutil
import sys
import traceback
from functools import partial

import pytest
import torch
import transformers

import hf_retrieval_assist
from hf_retrieval_assist import SamAssistant
from tests.support.lossless import build, run

PACKAGE = "hf_retrieval_assist"


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
    def __init__(self):
        self.model, self.attached = (build() for _ in range(2))
        self.old, beside = SamAssistant(), SamAssistant()
        hf_retrieval_assist.attach(self.attached, beside)
        self.plain = run(self.model)
        self.same(assistant=self.old)
        assert torch.equal(self.plain, run(self.attached))
        assert self.old.stats.total.calls == beside.stats.total.calls == 1

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
        self.same()
        for assistant in (self.old, new):
            self.same(custom_generate=assistant)
        package.install()
        self.same(assistant=new)
        assert (new.stats.last.tier != "plain") is serves


def forked(case):
    """Whether a function raises nothing in a fork of this process."""
    sys.stdout.flush()
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        case()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def main(chosen):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = [*imported()]
    cases = [(name,) for name in names if not chosen or name in chosen]
    cases += [tuple(names), tuple(reversed(names))]
    calls, failed = Calls(), 0
    for again in (reloaded, cleared, imported_again):
        for case in cases:
            if not forked(partial(calls.check_after, again, case)):
                failed += 1
                print(f"wrong: {again.__name__} {case[0]} to {case[-1]}")
    print(f"{3 * len(cases)} cases")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
