"""Kernels of packed layers and of the loss compile for a Hopper GPU, for an 8B Llama in bf16."""

from __future__ import annotations

import pytest
from support.triton_compiler import SHARED_BYTES_OF_AN_SM, compiled_by

# Tensors begin at multiples of 16 bytes there, as a launch would find them and specialise for.
CODE = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from windrow_sidecar.finetune.adapter import gradient_kernels, layer_kernels, share_kernels
from windrow_sidecar.finetune.model import loss_kernels

TENSORS = {"rstd": "*fp32", "into": "*fp32", "losses": "*fp32", "labels": "*i64"}
NUMBERS = {"epsilon": "fp32", "scale": "fp32"}
QKV, O, GATE_UP = (48, 64), (16, 16), (32, 32)

def compiled(name, warps=4, kernels=layer_kernels, **sizes):
    kernel = getattr(kernels, name)
    sizes |= {"WIDE": tl.float32} if "WIDE" in kernel.arg_names else {}
    signature, aligned = {}, {}
    for n, argument in enumerate(kernel.arg_names):
        base = argument.rstrip("0123")
        if argument in sizes:
            signature[argument] = "constexpr"
        elif argument in NUMBERS:
            signature[argument] = NUMBERS[argument]
        elif base in INTEGERS.get(name, ("tokens",)):
            signature[argument] = "i32"
        else:
            wide = "*i32" if base == "places" else "*bf16"
            signature[argument] = TENSORS.get(base, wide)
            if name == "pack_b" and base == "b":
                signature[argument] = "*fp32"
            aligned[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    ptx = made.asm["ptx"]
    return {
        "cubin": len(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
        "products": ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
    }

STRIDES = tuple(f"{of}_{what}" for of in ("query", "key", "value")
                for what in ("row", "head", "token"))
INTEGERS = {"rotate": ("tokens", "positions"),
            "rotate_back": ("tokens", "row_tokens", "positions", *STRIDES)}
def ranks(of, then=None):
    found = {"RANKS": of[0], "RANK_COLUMNS": of[1]}
    return found if then is None else found | {"NEXT_RANKS": then[0], "NEXT_COLUMNS": then[1]}
HALF = {"HALF": 64, "HALF_COLUMNS": 64, "ROWS": 32}
WHOLE, TILE = {"ROWS": 16, "BLOCK": 128}, {"ROWS": 32, "BLOCK": 128}
of_four = {}
for n, (units, out, (rank, columns)) in enumerate([
    (4096, 4096, O), (4096, 28672, GATE_UP), (14336, 4096, O), (4096, 6144, QKV)]):
    of_four |= {f"IN{n}": units, f"OUT{n}": out, f"RANKS{n}": rank, f"COLUMNS{n}": columns}
outs = {"OUT0": 4096, "OUT1": 1024, "OUT2": 1024, "RANK0": 16, "RANK1": 16, "RANK2": 16}
print(json.dumps({
    "pack_b": compiled("pack_b", kernels=share_kernels, RANK_COLUMNS=64, ROWS=64, **outs),
    "norm_onto_ranks": compiled("norm_onto_ranks", 8, UNITS=4096, **ranks(QKV), **WHOLE),
    "rotate": compiled("rotate", HEADS=40, VALUE_HEADS=8, **ranks(QKV), **HALF),
    "rotate_back": compiled("rotate_back", HEADS=32, KV_HEADS=8, **HALF),
    "add_and_norm": compiled("add_and_norm", 8, UNITS=4096, **ranks(O, GATE_UP), **WHOLE),
    "norm_back": compiled("norm_back", 8, UNITS=4096, **ranks(GATE_UP, O), **WHOLE),
    "norm_back of the first": compiled(
        "norm_back", 8, UNITS=4096, **ranks(QKV, (0, 16)), **WHOLE),
    "swiglu": compiled("swiglu", INNER=14336, **ranks(GATE_UP), **TILE),
    "swiglu_back": compiled("swiglu_back", INNER=14336, **ranks(O), **TILE),
    "add_share": compiled("add_share", kernels=share_kernels, UNITS=4096, **ranks(O), **TILE),
    "gradients": compiled("gradients", kernels=gradient_kernels, BLOCK=64, ROWS=64, **of_four),
    "cross_entropy": compiled(
        "cross_entropy", 8, loss_kernels, WORDS=128256, LEARNS=True, BLOCK=4096),
    "cross_entropy alone": compiled(
        "cross_entropy", 8, loss_kernels, WORDS=128256, LEARNS=False, BLOCK=4096),
}))
"""
WITHOUT_PRODUCTS = {"pack_b", "rotate_back", "cross_entropy", "cross_entropy alone"}


@pytest.mark.extended
def test_kernels_compile_for_hopper(tmp_path):
    pytest.importorskip("triton")
    found = compiled_by(CODE, tmp_path)
    assert all(kernel["cubin"] for kernel in found.values())
    without = {name for name, kernel in found.items() if not kernel["products"]}
    assert without == WITHOUT_PRODUCTS, "shares are not computed on tensor cores"
    # Programs of an SM hide each other's waits for memory: two of gradients, which are one long
    # product, and four of the others fit.
    fits = {name: SHARED_BYTES_OF_AN_SM // max(1, k["shared_bytes"]) for name, k in found.items()}
    assert fits.pop("gradients") >= 2
    assert min(fits.values()) >= 4
