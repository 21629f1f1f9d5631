"""Shared by decode and prefill: the online softmax over a tile of K and V from the pages.

Shapes: M query rows, N keys of a tile, BD and BV the head dims D and DV padded to a power of two.

A token's K scale multiplies its logits and its V scale its weight in the softmax, so the operands of both
products are the codes themselves, exact in float16:

- E4M3 and INT8 codes are float16 numbers, so Q and the weights are float16 too. Its 11 bits hold the 8 of
  bfloat16 queries; for their range `query_operand` scales each query row by a power of two, and the logits
  back in float32.
- A weight times a V scale may leave float16's range (a scale can be 2^-24, or 2^100). So `acc` is in units of
  the largest V scale so far, and the largest weight is 2^15: of two rows of V whose scales are 2^20 apart the
  smaller still has 20 bits.
- With float32 queries everything is float32, and "ieee": the default on a GPU would be TF32.

Triton's interpreter multiplies the bit patterns of bfloat16 in `tl.dot`; there such products are float32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench_kernels.checks import accept
from kvbench_kernels.kv.convert import INTERPRET, decode_e4m3, narrow, widen
from kvbench_kernels.kv.layout import LayerPages, attention_needs, check_pages
from kvbench_kernels.support import StoredFormat, supports

LOG2E = tl.constexpr(1.4426950408889634)
# `scale_granularity` -> what the kernels call it.
SCALES = {"none": "none", "token-head": "token", "tensor": "tensor"}
_TL_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def operand_dtype(fmt: StoredFormat, dtype: torch.dtype) -> torch.dtype:
    """The operands' dtype of both products, for queries of `dtype` on pages of `fmt`."""
    return torch.float16 if fmt.quantized and dtype != torch.float32 else dtype


def execution(fmt: StoredFormat, dtype: torch.dtype) -> str:
    """Operands and accumulator of both products: "float16 x float16 -> float32"."""
    name = str(operand_dtype(fmt, dtype)).removeprefix("torch.")
    return f"{name} x {name} -> float32"


# fmt: off
def kernel_options(cache: LayerPages, q_heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of both kernels."""
    _, kv_heads, page_size, head_dim = cache.k.shape
    value_dim = cache.v.shape[3]
    return {
        "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "PAGE": page_size, "D": head_dim, "DV": value_dim,
        "BD": triton.next_power_of_2(head_dim), "BV": triton.next_power_of_2(value_dim),
        "OPERAND": _TL_DTYPE[operand_dtype(cache.fmt, dtype)], "SCALES": SCALES[cache.fmt.scale_granularity],
        "EIGHT_BIT": cache.eight_bit,
    }


def check_arguments(
    cache: LayerPages, q: Tensor, table: Tensor, lengths: Tensor, sliding_window: int | None,
    softcap: float | None, sinks: Tensor | None, reads: Tensor | None,
) -> None:
    """ValueError for shapes, dtypes and strides that the kernels would read wrongly."""
    accept(supports(attention_needs(cache, q, sliding_window, softcap, sinks is not None)))
    check_pages(cache)
    k, v = cache.k, cache.v
    if q.shape[2] != k.shape[3] or q.stride(2) != 1:
        raise ValueError(
            f"q {tuple(q.shape)} with strides {q.stride()} and K pages {tuple(k.shape)} do not fit; q needs "
            "K's head dim, dense."
        )
    if not cache.fmt.quantized and not k.dtype == v.dtype == q.dtype:
        raise ValueError(
            f"q is {q.dtype} and native pages hold K in {k.dtype} and V in {v.dtype}; all must be the same."
        )
    if table.dtype != torch.int32 or table.stride(-1) != 1 or lengths.dtype != torch.int32:
        raise ValueError(
            f"The page table is {table.dtype} with strides {table.stride()} and the lengths are "
            f"{lengths.dtype}; both must be dense int32."
        )
    if len(table) != len(lengths):
        raise ValueError(f"{len(table)} rows in the page table and {len(lengths)} lengths must be as many.")
    if sinks is not None and (sinks.shape != (q.shape[1],) or not sinks.is_contiguous()):
        raise ValueError(f"Sinks {tuple(sinks.shape)} for {q.shape[1]} query heads; give one a head, dense.")
    if reads is not None and (reads.dtype != torch.int64 or reads.shape != (2,)):
        raise ValueError(f"The read counter is {reads.dtype} {tuple(reads.shape)}; it must be [2] int64.")


@triton.jit
def wide_offset(index, stride):
    """index * stride in 64 bits: page 131,072 of 16,384 elements starts at 2^31."""
    return index.to(tl.int64) * stride


@triton.jit
def codes_to(x, dtype: tl.constexpr):
    """Stored codes as operands, exactly."""
    if INTERPRET and x.dtype == tl.float8e4nv:
        return decode_e4m3(x.to(tl.int8, bitcast=True)).to(dtype)
    return x.to(dtype)


@triton.jit
def product(a, b, acc):
    """acc [M, N] float32 + a [M, K] @ b [K, N]."""
    if INTERPRET and a.dtype == tl.bfloat16:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def query_operand(q, scaling, operand: tl.constexpr):
    """q [M, BD] as an operand, and the factor [M] that makes its products logits."""
    if q.dtype == tl.bfloat16 and operand == tl.float16:
        x = widen(q) if INTERPRET else q.to(tl.float32)  # the same numbers
        # A row's largest element is scaled to [2^14, 2^15) by an exact power of two; a row of zeros stays so.
        exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23
        exponent = tl.maximum(exponent, 15)
        up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        return (x * up[:, None]).to(tl.float16), down * scaling
    return q.to(operand), tl.full([q.shape[0]], scaling, tl.float32)


@triton.jit
def load_rows(ptr, rows, inside, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """[N, BD] codes of the rows [N] int64; zeros where a row is not inside, and beyond D."""
    d = tl.arange(0, BD)
    at = ptr + rows[:, None] * D + d[None, :]
    if D == BD:
        return tl.load(at, mask=inside[:, None], other=0.0) if MASKED else tl.load(at)
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def attend_tile(
    acc, m, total, unit, q, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, j, inside,
    visible, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, OPERAND: tl.constexpr, SCALES: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax: the new acc, m, total and unit.

    acc [M, BV] in `unit`s, m [M]: largest logit so far (base 2), total [M]: sum of weights, unit: largest V
    scale so far (SCALES "token"). j [N]: the tile's tokens; inside [N]: those that are loaded; visible [M or
    1, N]: those that a row sees; all if not MASKED."""
    page_at = table_ptr + j // PAGE
    page = tl.load(page_at, mask=inside, other=0) if MASKED else tl.load(page_at)
    rows = wide_offset(page, KV_HEADS * PAGE) + (kv_head * PAGE + j % PAGE)
    k = codes_to(load_rows(k_ptr, rows, inside, D, BD, MASKED), OPERAND)
    s = product(q, tl.trans(k), tl.zeros([m.shape[0], j.shape[0]], tl.float32)) * factor[:, None]
    if SCALES == "token":
        s *= load_scales(k_scale_ptr, rows, inside, MASKED)[None, :]
    if SOFTCAP is not None:
        s = soft_cap(s, SOFTCAP)
    s *= LOG2E
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing yet has -inf, and -inf - -inf would be NaN.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    keep = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    total = total * keep + tl.sum(p, 1)
    if SCALES == "token":
        v_scale = load_scales(v_scale_ptr, rows, inside, MASKED)
        new_unit = tl.maximum(unit, tl.max(v_scale, 0))
        p *= (v_scale * (1.0 / new_unit) * 32768.0)[None, :]
        keep *= unit / new_unit
        unit = new_unit
    v = codes_to(load_rows(v_ptr, rows, inside, DV, BV, MASKED), OPERAND)
    acc = product(narrow(p, OPERAND), v, acc * keep[:, None])
    return acc, new_m, total, unit


@triton.jit
def load_scales(ptr, rows, inside, MASKED: tl.constexpr):
    """[N] float32 scales of the rows; zeros where a row is not inside."""
    scale = tl.load(ptr + rows, mask=inside, other=0.0) if MASKED else tl.load(ptr + rows)
    return scale.to(tl.float32)


@triton.jit
def start_state(M: tl.constexpr, BV: tl.constexpr):
    """acc, m, total and unit before the first tile. 2^-126 is the smallest scale that is stored."""
    acc = tl.zeros([M, BV], tl.float32)
    return acc, tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), 1.1754943508222875e-38


@triton.jit
def in_ones(acc, unit, v_scale_ptr, SCALES: tl.constexpr):
    """acc without its unit."""
    if SCALES == "token":
        acc *= unit / 32768.0
    if SCALES == "tensor":
        acc *= tl.load(v_scale_ptr)
    return acc


@triton.jit
def add_sink(acc, m, total, sink):
    """acc and total with one more logit, which has no value. sink: [M] or a number."""
    sink = widen(sink) * LOG2E
    base = tl.maximum(m, sink)
    keep = tl.exp2(m - base)
    return acc * keep[:, None], total * keep + tl.exp2(sink - base)


@triton.jit
def soft_cap(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP), also for infinities and NaN."""
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * 1.4426950408889634 / CAP))))


@triton.jit
def add_reads(reads_ptr, tokens, once, EIGHT_BIT: tl.constexpr):
    """Count a sequence's tokens as read, in the one program for which `once` is true."""
    if reads_ptr is not None:
        tl.atomic_add(reads_ptr, tokens.to(tl.int64), mask=once)
        if EIGHT_BIT:
            tl.atomic_add(reads_ptr + 1, tokens.to(tl.int64), mask=once)
