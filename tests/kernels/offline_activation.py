"""Compiles the activation quantizer for an H200 without one. Not to be imported where Triton interprets."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench_kernels.gemm.activation import Launch, fp8_quantize_activation, launch_shape
from tests.kernels.offline_w8a8 import stack_bytes

ROWS = (1, 16, 64, 8192)


def compiled(launch: Launch, dtype: str) -> Any:
    """The compiled kernel for K a multiple of 128 * groups, with `.asm` and `.metadata`. dtype: "bf16", "fp16", "fp32"."""
    constants = {
        "ROWS": launch.rows, "GROUPS": launch.groups, "VECTOR": launch.vector, "EVEN_K": True, "PDL": True,
    }  # fmt: skip
    types = {"x": f"*{dtype}", "codes": "*u8", "scales": "*fp32"}
    names = fp8_quantize_activation.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned: dict[tuple[int], list[list[object]]] = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in types or name in ("k", "stride_x", "stride_scales")
    }
    source = ASTSource(fn=fp8_quantize_activation, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.warps, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts() -> dict[str, tuple[list[str], int]]:
    """Rows and dtype -> (its loads, stores, conversions and divisions, its stack bytes); rows of 4096 columns."""
    out = {}
    for m in ROWS:
        for dtype in ("bf16", "fp16", "fp32"):
            kernel = compiled(launch_shape(m, 4096), dtype)
            found = re.findall(
                r"\b(?:(?:ld|st)\.global|cvt\.rn\.satfinite|div|rcp)\.[\w.]+", kernel.asm["ptx"]
            )
            out[f"{m} {dtype}"] = (sorted(set(found)), stack_bytes(kernel))
    return out
