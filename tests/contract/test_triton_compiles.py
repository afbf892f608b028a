"""The engine's kernels compile for a Hopper GPU, for an 8B Llama in bf16; that needs no GPU."""

from __future__ import annotations

import pytest
from support.triton_compiler import SHARED_BYTES_OF_AN_SM, compiled_by

# Strides and addresses are multiples of 16 there, as a launch would find them and specialise for.
CODE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from windrow_sidecar.engines.builtin.step import triton_kernels as kernels

BF16, FP32, INT64 = "*bf16", "*fp32", "*i64"

def compiled(kernel, types, sizes, aligned=(), **options):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "cubin": len(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
        "products": ptx.count("mma.sync"),
        "copies_of_16_bytes": ptx.count("cp.async.cg"),
    }

found = {
    "attend_split": compiled(
        kernels.attend_split,
        dict(q=BF16, keys=BF16, values=BF16, lengths=INT64, table=INT64, partial=FP32,
             weight=FP32, q_batch_stride="i32", q_head_stride="i32", slot_stride="i32",
             length_stride="i32", table_stride="i32", splits="i32"),
        dict(GROUP=4, GROUP_ROWS=16, HEAD=128, HEAD_COLUMNS=128, PAGE=16, BLOCK=64),
        ("q", "keys", "values", "partial", "weight", "q_batch_stride", "q_head_stride",
         "slot_stride"),
        num_warps=4, num_stages=3),
    "rotate_and_store": compiled(
        kernels.rotate_and_store,
        dict(qkv=BF16, cosines=FP32, sines=FP32, positions=INT64, slots=INT64, q=BF16, keys=BF16,
             values=BF16, qkv_stride="i32", position_stride="i32", slot_of_stride="i32",
             slot_stride="i32", scale="fp32"),
        dict(HEADS=32, KV_HEADS=8, HALF=64, HALF_COLUMNS=64), num_warps=1),
    "gate": compiled(
        kernels.gate, dict(gate_up=BF16, out=BF16, inner="i32"), dict(BLOCK=1024), num_warps=4),
}
for splits in (1, 8, 32):
    found[f"join_splits-{splits}"] = compiled(
        kernels.join_splits,
        dict(partial=FP32, weight=FP32, out=BF16, splits="i32"),
        dict(SPLITS=splits, HEAD=128, HEAD_COLUMNS=128), num_warps=2)
print(json.dumps(found))
"""


@pytest.mark.extended
def test_the_kernels_compile_for_hopper_and_attention_is_pipelined(tmp_path):
    pytest.importorskip("triton")
    found = compiled_by(CODE, tmp_path)
    assert all(kernel["cubin"] for kernel in found.values())
    attention = found["attend_split"]
    assert attention["products"] > 0, "scores are not computed on tensor cores"
    # K and V come in whole lines, asynchronously, while the block before is computed; and four
    # programs fit on an SM.
    assert attention["copies_of_16_bytes"] > 0
    assert attention["shared_bytes"] * 4 < SHARED_BYTES_OF_AN_SM
