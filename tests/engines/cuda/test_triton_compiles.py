"""The kernels of attention in two launches compile for cards that are not here, within limits."""

import os
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_retrieval_assist.engines.cuda.triton_attention import (  # noqa: E402
    attend_parts,
    merge_parts,
    parts_at_once,
    tiles_of,
)

# What one program may take of a card's shared memory, in bytes.
CARDS = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# AMD's, with the threads of a warp.
AMD = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}
AMD_SHARED = 65536
# Depths of keys and of values: the usual ones, MLA's, and what is no power of two.
HEADS = [(depth, depth) for depth in (64, 80, 96, 128, 160, 192, 256, 512)] + [(192, 128)]
SIZES = {"fp32": 4, "bf16": 2}
MOST_SPILLED = 32

# Strides of tensors whose last axis is a head are multiples of 16, as are addresses.
STRIDES = {
    f"{tensor}_{axis}"
    for tensor in ("query", "key", "value")
    for axis in ("row", "head", "node", "slot")
}


def target_of(architecture):
    if architecture in AMD:
        return GPUTarget("hip", architecture, AMD[architecture])
    return GPUTarget("cuda", architecture, 32)


def compiled(kernel, dtype, constants, architecture, **options):
    """The kernel as it is compiled for a card when its launch is met first."""
    pointers = {
        **dict.fromkeys(("kept_at", "first_at"), "*i32"),
        **dict.fromkeys(("table_at", "hidden_at"), "*u8"),
        **dict.fromkeys(("outs_at", "weights_at"), "*fp32"),
        **{"unseen_at": "*i64", "scale": "fp32", "softcap": "fp32"},
    }
    types, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = f"*{dtype}" if name.endswith("_at") else "i32"
        types[name] = "constexpr" if name in constants else pointers.get(name, kind)
        if name in STRIDES or types[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target_of(architecture), options=options)


def spilled(kernel, tmp_path):
    """Bytes of a thread's registers that lie in memory."""
    program = tmp_path / "kernel.cubin"
    program.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", program], capture_output=True, text=True).stdout
    fields = dict(field.split(":", 1) for field in usage.split() if field.count(":") == 1)
    return int(fields["STACK"])


def attention(dtype, depth, out_depth, queries, architecture):
    """What attends to one part."""
    few, tiles = (
        tiles_of(depth, out_depth, SIZES[dtype], some, architecture in AMD)
        for some in (16, queries)
    )
    if queries > 16 and tiles == few:
        pytest.skip("the same program as for few queries")
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    kinds = {"LIMITED": True, "HOLES": True, "CAPPED": True}
    constants = {"DEPTH": depth, "OUT_DEPTH": out_depth, **tiles, **kinds}
    return compiled(attend_parts, dtype, constants, architecture, **options)


@pytest.mark.parametrize("architecture", CARDS)
@pytest.mark.parametrize("queries", [16, 64])
@pytest.mark.parametrize(("depth", "out_depth"), HEADS)
@pytest.mark.parametrize("dtype", SIZES)
def test_compiles_within_the_limits_of_a_card(
    dtype, depth, out_depth, queries, architecture, tmp_path
):
    kernel = attention(dtype, depth, out_depth, queries, architecture)
    assert kernel.metadata.shared <= CARDS[architecture]
    assert spilled(kernel, tmp_path) <= MOST_SPILLED
    if dtype != "fp32":
        assert any(name in kernel.asm["ptx"] for name in ("mma.sync", "wgmma", "tcgen05"))


@pytest.mark.parametrize("architecture", AMD)
@pytest.mark.parametrize("queries", [16, 64])
@pytest.mark.parametrize("depth", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", SIZES)
def test_compiles_for_amds_cards(dtype, depth, queries, architecture):
    kernel = attention(dtype, depth, depth, queries, architecture)
    assert kernel.metadata.shared <= AMD_SHARED
    if dtype != "fp32":
        assert any(name in kernel.asm["amdgcn"] for name in ("v_mfma", "v_wmma"))


@pytest.mark.parametrize("architecture", [*CARDS, *AMD])
@pytest.mark.parametrize("depth", [64, 512])
@pytest.mark.parametrize("dtype", SIZES)
def test_parts_are_merged_within_the_limits_of_a_card(dtype, depth, architecture, tmp_path):
    constants = {"DEPTH": depth, "DEPTH2": depth, "SINKS": True, "SOME": parts_at_once(depth)}
    kernel = compiled(merge_parts, dtype, constants, architecture)
    assert architecture in AMD or spilled(kernel, tmp_path) == 0


def test_nothing_is_compiled_anew_for_another_width_or_capacity():
    free = [{p.name for p in k.params if p.do_not_specialize} for k in (attend_parts, merge_parts)]
    assert free == [{"width", "columns", "capacity", "part_slots", "parts"}, {"width", "parts"}]


def test_tiles_are_powers_of_two_for_every_head():
    for size in (2, 4):
        for depth in range(1, 513):
            for queries in (1, 16, 17, 1024):
                tiles = tiles_of(depth, depth, size, queries)
                for name in ("DEPTH2", "OUT_DEPTH2", "TILE", "BLOCK"):
                    assert tiles[name] >= 16
                    assert tiles[name] & (tiles[name] - 1) == 0
                assert tiles["DEPTH2"] >= depth
