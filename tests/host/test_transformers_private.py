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

# PyTorch's; those of its operators that wait for a device, and the end of a broken capture, last.
PYTORCH = {"_C", "_nn", "_len_torch_function_stack", "_parameters", "_version", "_TensorMeta"}
PYTORCH |= {"_unique2", "_local_scalar_dense", "_to_copy", "_index_put_impl_"}
PYTORCH |= {"_cuda_endAllocateToPool"}
OTHERS = {
    "_handle",  # where xgrammar keeps the vocabulary that it would otherwise list anew
    "_at_fork_reinit",  # by which Python's own modules make locks anew in a forked child
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


def test_attributes_that_begin_with_an_underscore_are_our_own():
    """Whatever is read elsewhere under a private name is also set or defined in the package."""
    defined, read = set(), {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            defined.add(defined_by(node))
            read |= dict.fromkeys(() if path in HOSTS else names_of(node), path)
    private = {name for name in read if name.startswith("_") and not name.endswith("__")}
    # The server extends classes of transformers'.
    served = {name.text.partition("(")[0] for name in SERVER}
    foreign = private - defined - served - PYTORCH - OTHERS
    assert not foreign, {name: read[name] for name in foreign}
