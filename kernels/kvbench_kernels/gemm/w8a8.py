"""Products of two FP8 operands with block scales: y[M, N] = x @ w^T + bias, tensor cores on the codes
themselves.

x has a scale a row and 128 columns (`activation.quantize_activation`), w one a 128x128 block. The FP8 tensor
cores of Hopper keep some 14 bits of a sum, so one instruction chain covers one block of 128 columns from
zero; its result is multiplied by both scales and added in FP32. The order of summation is fixed: the same
bits on every call.

With splits > 1 several CTAs share a tile along K: each stores its FP32 part, and the one that comes last adds
the parts in the order of K."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvbench_kernels.checks import expect
from kvbench_kernels.gemm.activation import quantize_activation
from kvbench_kernels.gemm.blockwise import (
    BLOCK,
    SCALE_DTYPES,
    blocks,
    dequantize_blocks,
    quantize_activation_torch,
    scale_shape,
    with_rows_behind,
)
from kvbench_kernels.gemm.w8a8_config import BLOCKS_M, BLOCKS_N, Tiling, config, supports_w8a8
from kvbench_kernels.gemm.w8a8_kernel import fp8_matmul_w8a8
from kvbench_kernels.kv.quantize import e4m3_to_float
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl, tickets_of
from kvbench_kernels.splits import splits_used

__all__ = [
    "Tiling",
    "config",
    "fp8_linear_w8a8",
    "fp8_linear_w8a8_torch",
    "supports_w8a8",
    "w8a8",
    "w8a8_torch",
]

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def w8a8(
    codes_x: Tensor,
    scales_x: Tensor,
    codes_w: Tensor,
    scales_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """codes_x [M, K], codes_w [N, K] float8_e4m3fn, bias [N] in out_dtype or None -> [M, N] in out_dtype.

    scales_x [M, ceil(K/128)] float32 in the memory layout of `empty_activation_scales`; scales_w
    [ceil(N/128), ceil(K/128)] contiguous, of any of `SCALE_DTYPES`. out: where to put the result (last axis
    dense, any row stride), None for new memory. tiling: None for the chosen one. ValueError for what the
    kernel does not take. With splits > 1, calls on one device must be on one stream at a time (they share
    their tickets). Torch twin: `w8a8_torch`.
    """
    _check(codes_x, scales_x, codes_w, scales_w, bias, out_dtype)
    m, k = codes_x.shape
    n = codes_w.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=codes_x.device)
    else:
        expect("out", out, (m, n), (out_dtype,), codes_x.device, contiguous=False)
    if m == 0:
        return out
    if tiling is None:
        tiling = config(m, n, k)
    _check_tiling(tiling)
    tiles = triton.cdiv(m, tiling.block_m) * triton.cdiv(n, tiling.block_n)
    splits = splits_used(tiling, k)
    parts, tickets = out, out
    if splits > 1:
        parts = torch.empty(
            (tiles, splits, tiling.block_m, tiling.block_n), dtype=torch.float32, device=out.device
        )
        tickets = tickets_of(out.device, tiles)
    programs = tiles * splits
    if tiling.ctas:
        programs = min(programs, tiling.ctas * _multiprocessors(out.device))
    # The copy engine wants rows and the first byte at multiples of 16.
    tma = tiling.tma and codes_x.data_ptr() % 16 == 0 and codes_w.data_ptr() % 16 == 0
    x, w = _integers(codes_x), _integers(codes_w)
    if tma:
        x = TensorDescriptor.from_tensor(with_rows_behind(x), [tiling.block_m, BLOCK])
        w = TensorDescriptor.from_tensor(w, [min(tiling.block_n, BLOCK), BLOCK])
    pdl = tiling.pdl and out.is_cuda and has_pdl(out.device)
    compiled = fp8_matmul_w8a8[(programs,)](
        x, scales_x, w, _integers(codes_w), scales_w, out if bias is None else bias, out, parts, tickets, m,
        n, k, scales_x.stride(1) // 4, out.stride(0), splits, tiling.group,
        BIAS=bias is not None, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, SPLIT=splits > 1,
        SWAP=tiling.swap, EVEN_K=k % BLOCK == 0, TMA=tma, WALK=tiling.ctas > 0, PDL=pdl,
        PREFETCH=pdl and tiling.prefetch, num_warps=tiling.warps, num_stages=tiling.stages,
        maxnreg=tiling.registers or None, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    launched(fp8_matmul_w8a8.fn.__name__, compiled)
    return out


def fp8_linear_w8a8(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None
) -> Tensor:
    """x [M, K] float, codes [N, K], scales [ceil(N/128), ceil(K/128)] -> [M, N] in x's dtype: two launches.

    x is rounded to E4M3 first, one scale a row and 128 columns. Torch twin: `fp8_linear_w8a8_torch`.
    """
    codes_x, scales_x = quantize_activation(x)
    return w8a8(codes_x, scales_x, codes, scales, bias, x.dtype, tiling)


def w8a8_torch(
    codes_x: Tensor,
    scales_x: Tensor,
    codes_w: Tensor,
    scales_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Torch twin of `w8a8`: the product of the two dequantized operands in float32, one rounding."""
    k = codes_x.shape[1]
    x = e4m3_to_float(codes_x) * scales_x.repeat_interleave(BLOCK, 1)[:, :k]
    y = x @ dequantize_blocks(codes_w, scales_w).t()
    launched("fp8_matmul_w8a8_torch")
    return (y if bias is None else y + bias.float()).to(out_dtype)


def fp8_linear_w8a8_torch(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch twin of `fp8_linear_w8a8`."""
    codes_x, scales_x = quantize_activation_torch(x)
    return w8a8_torch(codes_x, scales_x, codes, scales, bias, x.dtype)


def _integers(codes: Tensor) -> Any:
    """Triton's interpreter has no true E4M3: there the codes travel as int8."""
    return codes if codes.is_cuda else codes.view(torch.int8)


def _check(
    codes_x: Tensor,
    scales_x: Tensor,
    codes_w: Tensor,
    scales_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """ValueError for what would be read wrongly."""
    if codes_w.dim() != 2 or codes_x.dim() != 2 or codes_x.shape[1] != codes_w.shape[1]:
        raise ValueError(
            f"Codes of x are {list(codes_x.shape)} and of the weight {list(codes_w.shape)}; "
            "they must be [M, K] and [N, K]."
        )
    n, k = codes_w.shape
    m = codes_x.shape[0]
    if n < 1 or k < 16 or k % 16:
        raise ValueError(f"A weight is {n} x {k}; it takes N >= 1 and a multiple of 16 as K. Use F.linear.")
    device = codes_x.device
    expect("codes_x", codes_x, (m, k), (torch.float8_e4m3fn,), device)
    expect("codes_w", codes_w, (n, k), (torch.float8_e4m3fn,), device)
    if (
        scales_x.shape != (m, blocks(k))
        or scales_x.dtype != torch.float32
        or (m > 1 and scales_x.stride(0) != 1)
        or (m > 0 and (scales_x.stride(1) % 4 or scales_x.stride(1) < m or scales_x.data_ptr() % 16))
        or scales_x.device != device
    ):
        raise ValueError(
            f"scales_x is {list(scales_x.shape)} {scales_x.dtype} with strides {scales_x.stride()} on "
            f"{scales_x.device}; "
            f"expected [{m}, {blocks(k)}] float32 with dense columns padded to a multiple of 4 on {device}, "
            "as "
            "quantize_activation makes them."
        )
    expect("scales_w", scales_w, scale_shape(n, k), SCALE_DTYPES, device)
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; it takes bfloat16, float16 or float32.")
    if bias is not None:
        expect("bias", bias, (n,), (out_dtype,), device)


def _check_tiling(tiling: Tiling) -> None:
    blocks_m, blocks_n = (BLOCKS_M, (64, 128)) if tiling.swap else ((64, 128), BLOCKS_N)
    if tiling.block_m not in blocks_m or tiling.block_n not in blocks_n:
        raise ValueError(
            f"A tile of {tiling.block_m} rows of x by {tiling.block_n} of the weight has no kernel; block_n "
            "is 64, "
            "128 or, without swap, 256; block_m 64 or 128, with swap also 16 or 32."
        )


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 3
