"""Activations to FP8 E4M3FN with one scale a row and 128 columns, in one launch: the left operand of `w8a8`.

The bytes and scales are those of `blockwise.quantize_activation_torch`, on a GPU and in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from kvbench_kernels.gemm.blockwise import BLOCK, blocks, empty_activation_scales
from kvbench_kernels.kv.convert import INTERPRET, encode_e4m3, widen
from kvbench_kernels.kv.layout import unsigned
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """What a program takes: `rows` rows of `groups` blocks of 128 columns, by `warps` warps. All are powers
    of two.

    vector: columns next to each other that a thread takes, at most. 8 columns of 16 bits are one load of 16
    bytes and neighbouring threads read neighbouring bytes; 16 are two loads, one store of 16 bytes, and half
    the work for a scale.
    """

    rows: int
    groups: int
    warps: int
    vector: int = 8


# Up to so many rows of x, the launch that was within 5% of the fastest measured, 4096 and 12288 columns.
# H200, torch 2.11.0, triton 3.6.0, 2026-11-29.
MEASURED: tuple[tuple[float, Launch], ...] = (
    (1, Launch(1, 8, 4, 8)),
    (16, Launch(8, 1, 4, 8)),
    (64, Launch(2, 4, 2, 16)),
    (float("inf"), Launch(8, 2, 4, 16)),
)
# Programs along the second and third axis of a launch, at most.
AXIS = 65535


def launch_shape(m: int, k: int) -> Launch:
    """The launch for x [m, k], m > 0: the measured one, no wider than x."""
    launch = next(launch for rows, launch in MEASURED if m <= rows)
    return replace(launch, groups=min(launch.groups, triton.next_power_of_2(blocks(k))))


@triton.jit
def saturated_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 to the byte of E4M3FN, to nearest even, saturated at 448; NaN is 0x7F, an infinity 448."""
    if INTERPRET:
        code = encode_e4m3(tl.minimum(tl.maximum(x, -448.0), 448.0))
        return tl.where(x == x, code, 0x7F).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _finite_or_nan(x):  # type: ignore[no-untyped-def]
    """float32 with NaN for an infinity: one instruction, as infinity * 0 is NaN. A zero keeps its sign."""
    if INTERPRET:
        return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, float("nan"))
    return tl.fma(x, 0.0, x)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude along an axis; of NaN alone it is NaN or 0."""
    if INTERPRET:
        return tl.max(tl.where(x == x, tl.abs(x), 0.0), AXIS)
    return tl.max(tl.abs(x), AXIS)  # a GPU's maximum of a number and NaN is the number


@triton.jit
def _by_448(x):  # type: ignore[no-untyped-def]
    """x >= 0 over 448, correctly rounded from 2^-126 on and below that still below it; NaN stays."""
    if INTERPRET:
        return tl.math.div_rn(x, 448.0)
    # A division takes some ten instructions and a branch. One correction by the exact remainder makes the
    # product with the rounded 1/448 correct (Markstein 1990); the remainder is a multiple of 2^-143, so it is
    # exact down there too.
    inverse = 0.002232142857142857
    quotient = x * inverse
    return tl.fma(tl.fma(quotient, -448.0, x), inverse, quotient)


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    """1/x, correctly rounded, of a scale: it and its reciprocal are normal, so that flushing to 0 does not
    matter.
    """
    if INTERPRET:
        return tl.math.div_rn(1.0, x)
    return libdevice.rcp_rn(x)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def fp8_quantize_activation(  # type: ignore[no-untyped-def]
    x, codes, scales, m, k, stride_x, stride_scales,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS rows of GROUPS blocks of 128 columns; neighbours take neighbouring columns."""
    if PDL:
        # In this order: what starts early behind this launch may rely on all in front of it having ended.
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0) * GROUPS
    first = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROWS
    left = tl.minimum(m - first, ROWS).to(tl.int32)
    rows = tl.arange(0, ROWS)[:, None, None]
    groups = tl.arange(0, GROUPS)[None, :, None]
    # A thread takes VECTOR columns in a row.
    columns = groups * 128 + tl.max_contiguous(tl.arange(0, 128), VECTOR)[None, None, :]
    # Rows beyond the last read the last one instead: a load without a mask needs no zeros. A program with
    # `left` <= 0 reads that row too, and stores nothing.
    x += first * stride_x + block * 128 + tl.minimum(rows, left - 1).to(tl.int64) * stride_x + columns
    inside = rows < left
    if EVEN_K:
        values = tl.load(x)
    else:
        within = columns < k - block * 128
        values = tl.load(x, mask=within, other=0.0)
        inside = inside & within
    values = _finite_or_nan(widen(values))
    # The comparison with 2^-126 also takes NaN away.
    scale = tl.maximum(_by_448(_largest(values, 2)), 1.1754943508222875e-38)
    inverse = _reciprocal(scale)
    codes += first * k + block * 128 + rows.to(tl.int64) * k + columns
    tl.store(codes, saturated_e4m3(values * inverse[:, :, None]), mask=inside)
    rows = tl.arange(0, ROWS)[:, None]
    groups = tl.arange(0, GROUPS)[None, :]
    scales += block.to(tl.int64) * stride_scales + first + groups.to(tl.int64) * stride_scales + rows
    inside = rows < left
    if not EVEN_K:
        inside = inside & (groups < tl.cdiv(k, 128) - block)
    tl.store(scales, scale, mask=inside)


def quantize_activation(
    x: Tensor, launch: Launch | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [M, K] float -> codes [M, K] float8_e4m3fn, scales [M, ceil(K/128)] float32 with stride (1, 128 *
    ceil(M/128)).

    x: bfloat16, float16 or float32, last axis dense, any row stride; M may be 0.
    On Hopper GPUs the launch is a programmatic dependent one, and a product behind that is too starts early:
    it waits for the end of this one before it reads what this one writes. The memory behind the codes has
    room for a multiple of 128 rows, as that behind the scales has; nothing is written there. launch: None for
    `launch_shape`'s. scales: where to put them, [M, ceil(K/128)] float32 with dense columns, any distance
    apart; None for new memory. ValueError for other tensors. Torch twin:
    `blockwise.quantize_activation_torch`.
    """
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}; it takes [M, K] in bfloat16, float16 or float32. Reshape or "
            "cast it."
        )
    m, k = x.shape
    if m > 0 and k > 1 and x.stride(1) != 1:
        raise ValueError(
            f"x has a last axis of stride {x.stride(1)}; it must be dense. Call contiguous() on it."
        )
    codes = torch.empty(blocks(m) * BLOCK, k, dtype=torch.float8_e4m3fn, device=x.device)[:m]
    if scales is None:
        scales = empty_activation_scales(m, k, x.device)
    elif (
        scales.shape != (m, blocks(k))
        or scales.dtype != torch.float32
        or scales.device != x.device
        or (m > 1 and scales.stride(0) != 1)
        or scales.stride(1) < m
    ):
        raise ValueError(
            f"scales are {list(scales.shape)} {scales.dtype} with strides {scales.stride()} on "
            f"{scales.device}; they must be "
            f"[{m}, {blocks(k)}] float32 with dense columns on {x.device}."
        )
    if m == 0 or k == 0:
        return codes, scales
    shape = launch or launch_shape(m, k)
    down = triton.cdiv(m, shape.rows)
    deep = triton.cdiv(down, AXIS)
    pdl = x.is_cuda and has_pdl(x.device)
    compiled = fp8_quantize_activation[(triton.cdiv(blocks(k), shape.groups), triton.cdiv(down, deep), deep)](
        x, unsigned(codes), scales, m, k, x.stride(0), scales.stride(1),
        ROWS=shape.rows, GROUPS=shape.groups, VECTOR=shape.vector, EVEN_K=k % (shape.groups * BLOCK) == 0,
        PDL=pdl, num_warps=shape.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    launched(fp8_quantize_activation.fn.__name__, compiled)
    return codes, scales
