"""The kernels of attention in two launches compile for cards that are not here."""

import os

import pytest

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_retrieval_assist.kernels.triton_attention import attend_parts, merge_parts  # noqa: E402

DEPTH = {"DEPTH": 128, "DEPTH2": 128}


def compiled(kernel, pointers, constants, architecture):
    """The kernel as it is compiled for a card; what is neither pointer nor constant is counted."""
    types = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32))


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(("dtype", "block"), [("fp16", 64), ("bf16", 64), ("fp32", 32)])
@pytest.mark.parametrize("tile", [16, 64])
def test_compiles(architecture, dtype, block, tile):
    near = dict.fromkeys(("queries_at", "keys_at", "values_at"), f"*{dtype}")
    pointers = {
        **near,
        **dict.fromkeys(("kept_at", "first_at"), "*i32"),
        **dict.fromkeys(("table_at", "hidden_at"), "*u8"),
        **dict.fromkeys(("outs_at", "weights_at"), "*fp32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        **{"unseen_at": "*i64", "sinks_at": f"*{dtype}", "out_at": f"*{dtype}"},
    }
    out = {"OUT_DEPTH": 128, "OUT_DEPTH2": 128, "TILE": tile, "BLOCK": block, "PART": 256}
    kinds = {"LIMITED": True, "HOLES": True, "CAPPED": True}
    attend = compiled(attend_parts, pointers, DEPTH | out | kinds, architecture)
    merge = compiled(merge_parts, pointers, DEPTH | {"PARTS2": 32, "SINKS": True}, architecture)
    assert attend.asm["cubin"]
    assert merge.asm["cubin"]
    # What one program may take of the smallest of these cards.
    assert attend.metadata.shared <= 163 << 10
    if dtype != "fp32":
        assert any(name in attend.asm["ptx"] for name in ("mma.sync", "wgmma", "tcgen05"))
