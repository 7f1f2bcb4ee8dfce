"""Private names of transformers and accelerate are spelt in one module."""

import ast
from pathlib import Path

import hf_retrieval_assist
from hf_retrieval_assist.host import transformers_private
from hf_retrieval_assist.host.private_names import SERVER

PACKAGE = Path(hf_retrieval_assist.__file__).parent
HOST = Path(transformers_private.__file__)
# The same for what runs requests side by side, whose classes it extends.
HOSTS = (HOST, HOST.with_name("continuous_batching.py"))

# PyTorch's fused attentions that tell the log-sum-exp.
WAITING = ("_unique2", "_local_scalar_dense", "_to_copy", "_index_put_impl_")
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
        if path not in HOSTS
        for name in private(names_of(path)) & foreign
    }
    assert not elsewhere


def test_attributes_that_begin_with_an_underscore_are_our_own():
    """Whatever is read elsewhere under a private name is also set or defined in the package."""
    defined = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
    read = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path not in HOSTS
        for name in private(names_of(path)) - defined
    }
    # Operators that wait for a device, the end of a broken capture, the class of tensors' classes.
    waiting = [*WAITING, "_C", "_cuda_endAllocateToPool"]
    read -= {("verification/replay.py", name) for name in waiting}
    read -= {("verification/recorded_state.py", name) for name in ("_C", "_TensorMeta")}
    torch_only = {name for file, name in read if file.startswith("kernels/")}
    assert torch_only <= {
        *("_C", "_nn", "_len_torch_function_stack", "_parameters", "_version"),
        *(f"_scaled_dot_product_{kind}_attention{place}" for kind, place in ATEN),
    }
    # Where xgrammar keeps the vocabulary that it would otherwise list anew for every call.
    read -= {("grammars/xgrammar_matcher.py", "_handle")}
    # The server extends classes of transformers'.
    served = {name.text.partition("(")[0] for name in SERVER}
    read = {one for one in read if not (one[0].startswith("serving/") and one[1] in served)}
    # Python's own modules make locks anew by it in a forked child.
    assert {name for _, name in read} == torch_only | {"_at_fork_reinit"}, read
