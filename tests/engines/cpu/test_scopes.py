"""Scopes leave nothing behind, wherever an exception comes."""

import linecache
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_retrieval_assist import reroute
from hf_retrieval_assist.engines import cpu as kernels
from hf_retrieval_assist.engines.cpu.reroute import all_scopes_left
from hf_retrieval_assist.engines.cpu.skinny import in_route, route_depth, verifies
from hf_retrieval_assist.host import scopes as scopes_module
from hf_retrieval_assist.host.scopes import attending, innermost
from tests.support.threads import elsewhere

FILES = str(Path(kernels.__file__).parent), scopes_module.__file__


class Interrupt:
    """Scope that raises KeyboardInterrupt at the nth line, call or return in the kernels."""

    def __init__(self, place):
        self.left = place

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        # A tracer can raise where a block of `with` ends, which is no place for signals.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not line.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(None)


def state():
    names = "sdpa", "flex_attention"
    functions = [ALL_ATTENTION_FUNCTIONS.get(name) for name in names]
    return F.linear, functions, route_depth(), verifies(), innermost()


def computed(module):
    """What attention of a module is computed by within a scope of that module."""

    def attend(plain, module):
        return plain, module

    with attending("sdpa", {module}, attend):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module)


def scopes(module):
    with reroute(verifying=True), attending("sdpa", {module}, lambda plain, module: module):
        assert in_route()
        assert verifies()
        with reroute(), attending("flex_attention", {module}, lambda plain, module: module):
            assert innermost().name == "flex_attention"


def test_what_is_interrupted_anywhere_is_left():
    module, before = object(), state()
    plain = computed(module)
    for place in range(1, 5000):  # more lines with each class that other tests have fused
        try:
            with all_scopes_left(), Interrupt(place):
                scopes(module)
            break
        except KeyboardInterrupt:
            pass
        assert state() == before, place
        assert computed(module) == plain, place
        scopes(module)
        assert state() == before, place
    assert 50 < place < 4999


def test_what_was_entered_before_stays():
    module = object()
    with reroute(), attending("sdpa", {module}, lambda plain, module: module) as outer:
        before = state()
        with all_scopes_left():
            reroute().__enter__()
            attending("sdpa", set(), None).__enter__()
            attending("flex_attention", set(), None).__enter__()
        assert state() == before
        assert innermost() is outer
        assert ALL_ATTENTION_FUNCTIONS["sdpa"](module) is module


def of_name(name):
    return lambda: attending(name, set(), None)


SDPA, FLEX = of_name("sdpa"), of_name("flex_attention")


@pytest.mark.parametrize(
    ("own", "other", "name"),
    [
        *((reroute, reroute, "sdpa"), (reroute, SDPA, "sdpa"), (SDPA, reroute, "sdpa")),
        *((SDPA, SDPA, "sdpa"), (FLEX, FLEX, "flex_attention")),
    ],
)
def test_scopes_of_two_threads_share_one_function_and_the_last_takes_it_back(
    own, other, name, monkeypatch
):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, plain := lambda module: module)
    linear, functions = F.linear, ALL_ATTENTION_FUNCTIONS
    with ExitStack() as stack:
        with own():
            routed = functions[name]
            stack.enter_context(elsewhere(other()))
            assert functions[name] is routed is not plain
        assert functions[name] is routed
        assert (F.linear is not linear) == (other is reroute)
    assert functions[name] is plain
    assert F.linear is linear
    with own():
        assert functions[name] is routed, "compiled code would be made anew"


def test_only_the_modules_of_a_scope_are_served():
    served, other = object(), object()

    def plain(module, *arguments, **options):
        return "plain", module, arguments, options

    def attend(given, module, *arguments, **options):
        assert given is plain
        return "served", module, arguments, options

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", plain)
        with attending("sdpa", {served}, attend):
            function = ALL_ATTENTION_FUNCTIONS["sdpa"]
            assert function(served, 1, mask=2) == ("served", served, (1,), {"mask": 2})
            assert function(other, 1, mask=2) == ("plain", other, (1,), {"mask": 2})
