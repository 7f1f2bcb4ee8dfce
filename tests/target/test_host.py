"""Private names of transformers and accelerate are spelt in one module."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from transformers import DynamicCache, cache_utils

import hf_retrieval_assist
from hf_retrieval_assist.target import host

PACKAGE = Path(hf_retrieval_assist.__file__).parent
HOST = Path(host.__file__)


# PyTorch's fused attentions that tell the log-sum-exp.
ATEN = [("flash", "_for_cpu"), ("efficient", "")]


def names_of(path):
    """Attributes that a module reads of anything, by dot or by `getattr` and `hasattr`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def private(names):
    return {name for name in names if str(name).startswith("_") and not str(name).endswith("__")}


def test_only_the_host_module_spells_private_names():
    foreign = private(names_of(HOST))
    assert "_prefill" in foreign
    elsewhere = {
        (path.relative_to(PACKAGE), name)
        for path in PACKAGE.rglob("*.py")
        if path != HOST
        for name in private(names_of(path)) & foreign
    }
    assert not elsewhere


def test_attributes_that_begin_with_an_underscore_are_our_own():
    """Whatever is read elsewhere under a private name is also set or defined in the package."""
    defined = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
    read = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path != HOST
        for name in private(names_of(path)) - defined
    }
    torch_only = {name for file, name in read if file.startswith("kernels/")}
    assert torch_only <= {
        *("_C", "_nn", "_len_torch_function_stack"),
        *(f"_scaled_dot_product_{kind}_attention{place}" for kind, place in ATEN),
    }
    assert {name for _, name in read} == torch_only, read


def test_layers_that_a_version_lacks_are_of_no_cache():
    assert host.cache_layer("DynamicLayer") is cache_utils.DynamicLayer
    absent = host.cache_layer("LayerOfALaterVersion")
    cache = DynamicCache()
    cache.update(*(torch.zeros(1, 1, 2, 4) for _ in range(2)), 0)
    assert not any(isinstance(layer, absent) for layer in cache.layers)
    # A layer of ours may still be derived from it beside the ones that are there.
    assert issubclass(absent, cache_utils.DynamicLayer)


def test_layers_with_states_are_made_and_cropped_as_their_version_can():
    class Old:
        pass

    class New:
        number_of_states = 3
        is_croppable = True

    assert host.number_of_states(Old()) == ()
    assert host.number_of_states(New()) == (3,)
    assert not host.is_croppable(Old())
    assert host.is_croppable(New())


def test_the_callers_cache_is_known_as_such():
    given, made = DynamicCache(), DynamicCache()
    host.mark_callers({"past_key_values": given, "cache_params": None, "max_new_tokens": 3})
    assert host.is_callers(given)
    assert not host.is_callers(made)
