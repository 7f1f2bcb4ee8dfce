"""What the package counts on in transformers is there, and a release without it is told of; private
names are spelt in the core's module for them."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import transformers
from transformers import GenerationMixin

import hf_retrieval_assist
from hf_retrieval_assist.host import (
    callers_code,
    plain_step,
    private_names,
    transformers_private,
)
from hf_retrieval_assist.host.transformers_private import loop
from tests.support.lossless import build, equal, knowing, run, same
from tests.support.parts import since

PACKAGE = Path(hf_retrieval_assist.__file__).parent


@pytest.fixture
def fresh():
    """What is found of a release once is found anew."""
    private_names.why_plain.cache_clear()
    yield
    private_names.why_plain.cache_clear()


def test_what_a_release_lacks_is_named(monkeypatch):
    assert not private_names.absent(private_names.NEEDED)
    monkeypatch.delattr(GenerationMixin, "_has_unfinished_sequences")
    assert private_names.absent(private_names.NEEDED) == [
        "GenerationMixin._has_unfinished_sequences"
    ]
    for name in ("transformers.no_module:Thing.name", "transformers:NoThing.name"):
        assert private_names.absent([name]) == [name.partition(":")[2]]


@since("5.20", "continuous batching")
def test_what_drafts_in_continuous_batching_is_there():
    lists = import_module(f"{PACKAGE.name}.extensions.serving.private_names")
    assert not private_names.absent(lists.CONTINUOUS_BATCHING)


def test_a_release_in_which_nothing_can_be_assisted_says_so(llama, monkeypatch, told, fresh):
    assistant = knowing(run(llama))
    monkeypatch.setattr(private_names, "absent", lambda names: ["GenerationMixin._prefill"])
    for _ in range(2):
        same(llama, assistant=assistant)
    assert told.text.count("every call of every model is decoded plainly") == 1
    assert "works with: GenerationMixin._prefill" in told.text
    assert assistant.stats.total.steps == 0


def test_a_release_that_nobody_tried_is_served_and_said_so_once(monkeypatch, told, fresh):
    monkeypatch.setattr(private_names, "__version__", "5.99.0.dev0")
    model = build()
    for _ in range(2):
        equal(model)
    assert told.text.count("transformers 5.99.0.dev0 is newer") == 1


@pytest.mark.parametrize("name", ["cache", "past_key_values", "kept"])
def test_the_caches_name_is_read_from_transformers(monkeypatch, name):
    namespace = {"Cache": transformers.Cache}
    exec(f"def prepare(self, input_ids, {name}: Cache | None = None): pass", namespace)
    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", namespace["prepare"])
    assert private_names.cache_parameter() == name


def test_a_cache_is_found_under_any_name_of_it():
    given = transformers_private.given_cache
    assert given({"past_key_values": 3}) == ("past_key_values", 3)
    assert given({"cache": 4, "past_key_values": None}) == ("cache", 4)
    assert given({})[1] is None


HOST = Path(transformers_private.__file__)
# It extends classes of transformers'.
SERVING = PACKAGE / "extensions" / "serving"
# PyTorch's; those of its operators that wait for a device, and the end of a broken capture, last.
PYTORCH = {
    *("_C", "_dynamo", "_nn", "_len_torch_function_stack", "_parameters", "_schema", "_version"),
    *("_TensorMeta", "_buffers", "_unique2", "_local_scalar_dense", "_to_copy"),
    *("_index_put_impl_", "_cuda_endAllocateToPool"),
}
OTHERS = {
    "_getframe",  # the caller's line, which transformers' warnings name
    "_handle",  # where xgrammar keeps the vocabulary that it would otherwise list anew
    "_replace",  # Python's named tuples have it
    "_exit",  # ends a process whose threads nothing can interrupt
    "_at_fork_reinit",  # Python's own modules make locks anew in a forked child by it
}


def names_of(node):
    """What a node of a syntax tree reads of anything under a name, by dot or by a function."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        return {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return set()


def defined_by(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return getattr(node, "attr", getattr(node, "id", None)) if stored else None


@pytest.mark.slow
def test_attributes_that_begin_with_an_underscore_are_our_own():
    """Whatever is read elsewhere under a private name is set or defined in the package, and none
    that the host module spells."""
    defined, spelt, read = set(), set(), {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {n for n in names_of(node) if n.startswith("_") and not n.endswith("__")}
            defined.add(defined_by(node))
            spelt |= names if path == HOST else set()
            read |= dict.fromkeys(() if path == HOST or path.parent == SERVING else names, path)
    foreign = (read.keys() - defined - PYTORCH - OTHERS) | (read.keys() & spelt - PYTORCH)
    assert not foreign, {name: read[name] for name in foreign}


def test_every_name_of_the_loop_is_known():
    """A release whose loop asks something else is met here first."""
    assert plain_step.why_other_loop(build(), trusts=False) is None
    asked = {*callers_code.names_in(loop().__code__)}
    for name in asked & vars(GenerationMixin).keys():
        assert name in plain_step.LOOP_METHODS or name in ONCE, name


# What the loop asks once, before the first token.
ONCE = {"_valid_auto_compile_criteria", "get_compiled_call"}
