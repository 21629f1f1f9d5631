"""Quantize activations to FP8 E4M3FN with one scale a row and 128 columns, in one launch.

Codes and scales are bit for bit those of `blockwise.quantize_activation_torch`, also in Triton's interpreter.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from kvbench_kernels.checks import expect, expect_columns
from kvbench_kernels.gemm.blockwise import BLOCK, blocks, empty_activation_scales
from kvbench_kernels.kv.convert import INTERPRET, encode_e4m3, widen
from kvbench_kernels.kv.layout import unsigned
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """A program takes `rows` rows of `groups` blocks of 128 columns with `warps` warps, all powers of two.

    vector: the most adjacent columns of a thread. 8 columns of 16 bits are one load of 16 bytes; 16 are two
    loads, one store of 16 bytes, and half the work for a scale.
    """

    rows: int
    groups: int
    warps: int
    vector: int = 8


# (rows of x up to, launch within 5% of the fastest), for 4096 and 12288 columns.
# H200, torch 2.11.0, triton 3.6.0, 2026-11-29.
MEASURED: tuple[tuple[float, Launch], ...] = (
    (1, Launch(1, 8, 4, 8)),
    (16, Launch(8, 1, 4, 8)),
    (64, Launch(2, 4, 2, 16)),
    (float("inf"), Launch(8, 2, 4, 16)),
)
AXIS = 65535  # the most programs along the second and third axis of a launch


def launch_shape(m: int, k: int) -> Launch:
    """The launch for x [m, k], m > 0, no wider than x."""
    launch = next(launch for rows, launch in MEASURED if m <= rows)
    return replace(launch, groups=min(launch.groups, triton.next_power_of_2(blocks(k))))


# fmt: off
def quantize_activation(
    x: Tensor, launch: Launch | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] float8_e4m3fn, scales [M, ceil(K/128)] float32, stride (1, 128 * ceil(M/128)).

    x: bfloat16, float16 or float32, dense last axis; M may be 0. scales: where to store them, with dense
    columns. ValueError for other tensors. The memory behind codes and scales has room for a multiple of 128
    rows; nothing is written there. On Hopper GPUs this is a programmatic dependent launch: a product that
    follows starts early and waits for it before it reads its results.
    """
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(f"x is {list(x.shape)} {x.dtype}; it takes [M, K] in bfloat16, float16 or float32.")
    m, k = x.shape
    if m > 0 and k > 1:
        expect("x", x, (m, k), DTYPES, x.device, "with a dense last axis")
    codes = torch.empty(blocks(m) * BLOCK, k, dtype=torch.float8_e4m3fn, device=x.device)[:m]
    if scales is None:
        scales = empty_activation_scales(m, k, x.device)
    expect_columns("scales", scales, m, blocks(k), x.device, aligned=False)
    if m == 0 or k == 0:
        return codes, scales
    shape = launch or launch_shape(m, k)
    down = triton.cdiv(m, shape.rows)
    deep = triton.cdiv(down, AXIS)
    pdl = has_pdl(x.device)
    compiled = fp8_quantize_activation[(triton.cdiv(blocks(k), shape.groups), triton.cdiv(down, deep), deep)](
        x, unsigned(codes), scales, m, k, x.stride(0), scales.stride(1),
        ROWS=shape.rows, GROUPS=shape.groups, VECTOR=shape.vector, EVEN_K=k % (shape.groups * BLOCK) == 0,
        PDL=pdl, num_warps=shape.warps, **({"launch_pdl": True} if pdl else {}),
    )
    launched(fp8_quantize_activation.fn.__name__, compiled)
    return codes, scales


@triton.jit
def saturated_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 to the byte of E4M3FN, rounded to nearest even, saturated at 448; NaN is 0x7F."""
    if INTERPRET:
        code = encode_e4m3(tl.minimum(tl.maximum(x, -448.0), 448.0))
        return tl.where(x == x, code, 0x7F).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _finite_or_nan(x):  # type: ignore[no-untyped-def]
    """x with NaN for infinities, in one instruction: infinity * 0 is NaN. A zero keeps its sign."""
    if INTERPRET:
        return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, float("nan"))
    return tl.fma(x, 0.0, x)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude along an axis; NaN or 0 if all are NaN."""
    if INTERPRET:
        return tl.max(tl.where(x == x, tl.abs(x), 0.0), AXIS)
    return tl.max(tl.abs(x), AXIS)  # a GPU's maximum of a number and NaN is the number


@triton.jit
def _by_448(x):  # type: ignore[no-untyped-def]
    """x / 448 for x >= 0, correctly rounded from 2^-126 on, smaller below; NaN stays."""
    if INTERPRET:
        return tl.math.div_rn(x, 448.0)
    # A division takes about ten instructions and a branch. Instead, the product with the rounded 1/448 is
    # corrected by the exact remainder (Markstein 1990), a multiple of 2^-143 and so exact here too.
    inverse = 0.002232142857142857
    quotient = x * inverse
    return tl.fma(tl.fma(quotient, -448.0, x), inverse, quotient)


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    """1/x of a scale, correctly rounded: both are normal numbers, so flushing to 0 does not matter."""
    if INTERPRET:
        return tl.math.div_rn(1.0, x)
    return libdevice.rcp_rn(x)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def fp8_quantize_activation(  # type: ignore[no-untyped-def]
    x, codes, scales, m, k, stride_x, stride_scales,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):
    """One program takes ROWS rows of GROUPS blocks of 128 columns."""
    if PDL:
        # In this order: a kernel that starts early after this one relies on all before it having ended.
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0) * GROUPS
    first = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROWS
    left = tl.minimum(m - first, ROWS).to(tl.int32)
    rows = tl.arange(0, ROWS)[:, None, None]
    groups = tl.arange(0, GROUPS)[None, :, None]
    # A thread takes VECTOR columns in a row.
    columns = groups * 128 + tl.max_contiguous(tl.arange(0, 128), VECTOR)[None, None, :]
    # Rows beyond the last read the last one, so that the load needs no mask. A program with `left` <= 0 reads
    # it too and stores nothing.
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
