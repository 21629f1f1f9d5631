"""Compiles the W8A8 product for an H200 without one. Not to be imported where Triton interprets."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench_kernels.gemm.w8a8 import fp8_matmul_w8a8
from kvbench_kernels.gemm.w8a8_config import Tiling

TILINGS = {
    "128x128": Tiling(128, 128, warps=8),
    "64x128 split": Tiling(64, 128, splits=4),
    "64x64 swap": Tiling(64, 64, stages=6, swap=True),
    "32x64 swap pointers": Tiling(32, 64, swap=True, tma=False),
}


def compiled(tiling: Tiling) -> Any:
    """The compiled kernel for bfloat16 outputs and K a multiple of 128, with `.asm` and `.metadata`."""
    split = tiling.splits > 1
    constants = {
        "BIAS": False, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "SPLIT": split, "SWAP": tiling.swap,
        "EVEN_K": True, "TMA": tiling.tma, "WALK": tiling.ctas > 0, "PDL": tiling.pdl, "PREFETCH": tiling.prefetch,
    }  # fmt: skip
    types = dict.fromkeys(("x", "w", "w_memory"), "*fp8e4nv") | {"sx": "*fp32", "sw": "*fp32"}
    types |= {"bias": "*bf16", "y": "*bf16", "parts": "*fp32", "tickets": "*i32"}
    if tiling.tma:
        types["x"] = f"tensordesc<fp8e4nv[{tiling.block_m}, 128]>"
        types["w"] = f"tensordesc<fp8e4nv[{min(tiling.block_n, 128)}, 128]>"
    names = fp8_matmul_w8a8.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned: dict[tuple[int], list[list[object]]] = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("n", "k", "stride_y")
    }
    source = ASTSource(fn=fp8_matmul_w8a8, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": tiling.pdl}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(kernel: Any) -> int:
    """Bytes of local memory a thread: more than 0 where registers were spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", report.stdout))


def facts() -> dict[str, tuple[list[str], int]]:
    """Tiling -> (its tensor-core instructions, its stack bytes)."""
    out = {}
    for name, tiling in TILINGS.items():
        kernel = compiled(tiling)
        products = re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*", kernel.asm["ptx"])
        out[name] = (sorted(set(products)), stack_bytes(kernel))
    return out
