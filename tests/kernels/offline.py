"""Compiles the attention kernels for an H200 without one. Not to be imported where Triton interprets."""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention import decode, prefill
from kvbench_kernels.attention.tiles import kernel_options
from kvbench_kernels.kv.layout import DTYPES, LayerPages

POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compiled(
    kernel: str, fmt: str, dtype_name: str, head_dim: int = 64, group: int = 4, kv_heads: int = 8
) -> Any:
    """The compiled kernel, with `.asm` and `.metadata`. kernel: "decode" or "prefill"."""
    dtype = getattr(torch, dtype_name)
    layout = KV_FORMATS[fmt]
    payload = DTYPES[layout.payload_dtype] if layout.payload_dtype else dtype
    pages = torch.empty(1, kv_heads, 16, head_dim, dtype=payload)
    options = kernel_options(LayerPages(layout, pages, pages, None, None), kv_heads * group, dtype)
    if kernel == "decode":
        function, tuning = (
            decode.paged_decode_split,
            {"M": 16 if group <= 16 else 32, **decode._tuning(options)},
        )
    else:
        function, tuning = prefill.paged_prefill_causal, prefill._tuning(options, 4096)
    build = {name: tuning.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**options, **tuning, "SOFTCAP": None, "sinks_ptr": None, "window": None}
    scale = POINTER[DTYPES[layout.scale_dtype]] if layout.scale_dtype else None
    types = {
        "q_ptr": POINTER[dtype], "k_ptr": POINTER[payload], "v_ptr": POINTER[payload], "k_scale_ptr": scale,
        "v_scale_ptr": scale, "table_ptr": "*i32", "lengths_ptr": "*i32", "starts_ptr": "*i32", "reads_ptr": "*i64",
        "out_ptr": POINTER[dtype], "partial_ptr": "*fp32", "statistics_ptr": "*fp32", "scaling": "fp32",
    }  # fmt: skip
    signature, fixed = {}, {}
    for name in function.arg_names:
        if name in constants or (name in types and types[name] is None):
            signature[name], fixed[name] = "constexpr", constants.get(name)
        else:
            signature[name] = types.get(name, "i32")
    aligned: dict[tuple[int], list[list[object]]] = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or name.startswith("q_stride")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=build)


def products(kernel: str, fmt: str, dtype_name: str) -> list[str]:
    """Accumulator and operands of every tensor-core instruction: ["f32.f16.f16"]; nothing where it has none."""
    ptx = compiled(kernel, fmt, dtype_name).asm["ptx"]
    instructions = re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*?\.m\d+n\d+k\d+[\w.]*", ptx)
    found = {re.search(r"f32\.(\w+)\.(\w+)", text).group(0) for text in instructions}  # type: ignore[union-attr]
    return sorted(found)
