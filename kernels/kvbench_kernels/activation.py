"""Activations to FP8 E4M3FN with one scale a row and 128 columns, in one launch: the left operand of `w8a8`.

The bytes and scales are those of `blockwise.quantize_activation_torch`, on a GPU and in Triton's interpreter.

A correctly rounded division branches and takes a reciprocal an element. Here a row's 128 quotients share one
correctly rounded reciprocal r of the scale s: q = x*r, corrected twice by (x - q*s)*r in fused multiply-adds. The first
correction brings q within one unit in the last place, after which the second gives the correctly rounded quotient
(Markstein 1990). The remainder must be exact for that, so rows with tiny scales are taken 2^64 times as large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kvbench_kernels.blockwise import BLOCK, blocks, empty_activation_scales
from kvbench_kernels.convert import INTERPRET, encode_e4m3, widen
from kvbench_kernels.launches import launched
from kvbench_kernels.layout import unsigned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Elements a program takes: up to MANY in all, programs of 4 warps have 8 a thread, so that few rows spread over the
# GPU; beyond, 32 a thread, which keeps more loads under way and divides less often.
FEW, MANY = 1024, 2**21


@triton.jit
def saturated_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 to the byte of E4M3FN, rounded to nearest even, saturated at 448; NaN is 0x7F, an infinity 448."""
    if INTERPRET:
        code = encode_e4m3(tl.minimum(tl.maximum(x, -448.0), 448.0))
        return tl.where(x == x, code, 0x7F).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _quotients(values, scale):  # type: ignore[no-untyped-def]
    """values [ROWS, 128] / scale [ROWS], correctly rounded wherever E4M3 does not round to 0; NaN for non-finite."""
    if INTERPRET:
        finite = tl.abs(values) <= 3.4028234663852886e38
        quotient = tl.math.div_rn(tl.where(finite, values, 0.0), scale[:, None])
        return tl.where(finite, quotient, float("nan"))
    larger = tl.where(scale < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)  # 2^-60, 2^64
    s = scale * larger
    r = tl.math.div_rn(1.0, s)[:, None]
    s = s[:, None]
    x = values * larger[:, None]
    # An infinity turns NaN in its own remainder.
    q = x * r
    q = tl.fma(tl.fma(-q, s, x), r, q)
    q = tl.fma(tl.fma(-q, s, x), r, q)
    # -0 would lose its sign.
    bits = (q.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | (values.to(tl.uint32, bitcast=True) & 0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def fp8_quantize_activation(  # type: ignore[no-untyped-def]
    x, codes, scales, m, k, stride_x, stride_scales,
    ROWS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS rows of one block of 128 columns; neighbours take neighbouring columns."""
    if PDL:
        gdc_launch_dependents()
    column_blocks = tl.cdiv(k, 128)
    block = tl.program_id(0) % column_blocks
    first = (tl.program_id(0) // column_blocks).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, 128)
    inside = rows < m - first
    mask = inside[:, None] if EVEN_K else inside[:, None] & (columns < k - block * 128)[None, :]
    x += first * stride_x + block * 128
    values = widen(
        tl.load(x + rows[:, None].to(tl.int64) * stride_x + columns[None, :], mask=mask, other=0.0)
    )
    size = tl.abs(values)
    size = tl.where(size <= 3.4028234663852886e38, size, 0.0)  # NaN compares as false
    scale = tl.maximum(tl.math.div_rn(tl.max(size, 1), 448.0), 1.1754943508222875e-38)
    tl.store(scales + block.to(tl.int64) * stride_scales + first + rows, scale, mask=inside)
    codes += first * k + block * 128
    tl.store(
        codes + rows[:, None].to(tl.int64) * k + columns[None, :],
        saturated_e4m3(_quotients(values, scale)),
        mask=mask,
    )


def quantize_activation(x: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """x [M, K] float -> codes [M, K] float8_e4m3fn, scales [M, ceil(K/128)] float32 with stride (1, 4 * ceil(M/4)).

    x: bfloat16, float16 or float32, last axis dense, any row stride; M may be 0. pdl: lets a kernel behind that was
    launched for it (`w8a8` with a tiling's pdl) start early; it waits for the end of this one before it reads.
    ValueError for other tensors. Torch twin: `blockwise.quantize_activation_torch`.
    """
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}; it takes [M, K] in bfloat16, float16 or float32. Reshape or cast it."
        )
    m, k = x.shape
    if m > 0 and k > 1 and x.stride(1) != 1:
        raise ValueError(
            f"x has a last axis of stride {x.stride(1)}; it must be dense. Call contiguous() on it."
        )
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty_activation_scales(m, k, x.device)
    if m == 0 or k == 0:
        return codes, scales
    each = FEW if m * k <= MANY else 4 * FEW
    rows = min(triton.next_power_of_2(m), each // BLOCK)
    early = pdl and x.is_cuda
    compiled = fp8_quantize_activation[(blocks(k) * triton.cdiv(m, rows),)](
        x, unsigned(codes), scales, m, k, x.stride(0), scales.stride(1),
        ROWS=rows, EVEN_K=k % BLOCK == 0, PDL=early, num_warps=max(1, min(4, rows // 2)),
    )  # fmt: skip
    launched(fp8_quantize_activation.fn.__name__, compiled)
    return codes, scales
