"""Products of few rows with FP8 weights: y[M, N] = x[M, K] @ dequantized codes[N, K]^T + bias[N], M <= 128.

The weights are E4M3 codes with one scale a 128 x 128 block, read once at 8 bits; x keeps its 16 or 32 bits.
Both kernels accumulate in FP32 in a fixed order, so results are the same bits on every call, and the scale of
a block multiplies partial sums in FP32:

- `w8a16_vector` (M <= 4): codes go to registers in 16-byte loads and are multiplied there in FP32.
- `w8a16_dot` (M <= 128): x is padded to 16, 32, 64 or 128 rows, codes become 16-bit numbers in registers, and
  the tensor cores multiply, 128 columns at a time.

With splits > 1 several CTAs share a tile along K, as in `w8a8`. The torch twin of both is
`blockwise.fp8_dequantize_matmul_torch`, which rounds the dequantized weight to x's dtype; the kernels do not,
so they are closer to the exact product."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvbench_kernels.checks import accept, expect
from kvbench_kernels.gemm.blockwise import SCALE_DTYPES, scale_shape
from kvbench_kernels.gemm.skinny_config import VECTOR_M_MAX, Tiling
from kvbench_kernels.gemm.w8a16_config import config, rows_padded, supports_w8a16
from kvbench_kernels.kv.convert import INTERPRET, decode_e4m3, narrow, widen
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl, is_last, shared_tiles, splits_used


def _check(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None) -> None:
    if x.dim() != 2 or codes.dim() != 2 or codes.shape[1] != x.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and codes {list(codes.shape)}; they must be [M, K] and [N, K]. Flatten x."
        )
    (m, k), n, dtype = x.shape, codes.shape[0], (x.dtype,)
    accept(supports_w8a16(m, n, k, str(x.dtype).removeprefix("torch.")))
    expect("x", x, (m, k), dtype, x.device, "with a dense last axis")
    expect("codes", codes, (n, k), (torch.float8_e4m3fn,), x.device)
    expect("scales", scales, scale_shape(n, k), SCALE_DTYPES, x.device)
    if bias is not None:
        expect("bias", bias, (n,), dtype, x.device)
    if out is not None:
        expect("out", out, (m, n), dtype, x.device, "with a dense last axis")


# fmt: off
def w8a16(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], codes [N, K] float8_e4m3fn, scales [ceil(N/128), ceil(K/128)], bias [N] -> [M, N] like x.

    x: bfloat16 or float16 (M <= 128) or float32 (M <= 4), dense last axis. scales: one of `SCALE_DTYPES`.
    out: where to store the result (dense last axis). ValueError for other arguments. With splits > 1, calls
    on one device must be on one stream at a time (they share their tickets).
    """
    _check(x, codes, scales, bias, out)
    (m, k), n = x.shape, codes.shape[0]
    if tiling is None:
        tiling = config(m, n, k)
        if x.dtype == torch.float32 and tiling.kind == "dot":
            tiling = Tiling("vector", 8, 256, stages=3)
    if tiling.kind == "vector" and m > VECTOR_M_MAX:
        raise ValueError(f"A vector tiling takes 1 to {VECTOR_M_MAX} rows of x, not {m}; use kind 'dot'.")
    if tiling.kind == "dot" and x.dtype == torch.float32 and x.is_cuda:
        raise ValueError("A dot tiling takes bfloat16 or float16, not float32; use kind 'vector'.")
    y = torch.empty((m, n), dtype=x.dtype, device=x.device) if out is None else out
    tiles, splits = -(-n // tiling.block_n), splits_used(tiling, k)
    height = m if tiling.kind == "vector" else rows_padded(m)
    parts, tickets = shared_tiles(y, tiles, splits, height, tiling.block_n)
    pdl = tiling.pdl and has_pdl(x.device)
    arguments = (
        x, codes.view(torch.int8), scales, y if bias is None else bias, y, parts, tickets,
        n, k, x.stride(0), y.stride(0),
    )
    options: dict[str, Any] = {
        "BIAS": bias is not None, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "SPLITS": splits,
        "STAGES": tiling.stages, "EVEN_K": k % tiling.block_k == 0, "PDL": pdl, "num_warps": tiling.warps,
        **({"launch_pdl": True} if pdl else {}),
    }
    kernel = w8a16_vector if tiling.kind == "vector" else w8a16_dot
    if tiling.kind == "vector":
        compiled = kernel[(tiles, splits)](*arguments, M=m, **options)
    else:
        compiled = kernel[(tiles, splits)](
            *arguments, m, M_PAD=height, SWAP=tiling.swap, CVT=tiling.cvt, **options
        )
    launched(kernel.fn.__name__, compiled)
    return y


# Four E4M3 codes to four bfloat16: the bits are moved to their places, and the bias is 120 larger (exact,
# subnormal codes too). 0x7F would become 480; the last two steps make it NaN: times 1.07 * 2^119 only 480
# overflows, and infinity times zero is NaN, while all else adds nothing.
_E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, z; prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; shr.u32 c, a, 4;
    shr.u32 d, b, 4; and.b32 c, c, 0x07F007F0; and.b32 d, d, 0x07F007F0;
    lop3.b32 a, a, 0x80008000, c, 0xEA; lop3.b32 b, b, 0x80008000, d, 0xEA; mov.b32 c, 0x7B807B80;
    mul.rn.bf16x2 a, a, c; mul.rn.bf16x2 b, b, c; mov.b32 d, 0x7B097B09; mul.rn.bf16x2 c, a, d;
    mul.rn.bf16x2 d, b, d; mov.b32 z, 0; fma.rn.bf16x2 $0, c, z, a; fma.rn.bf16x2 $1, d, z, b;
}""")

# Two float16 to two bfloat16 over float32; exact for values of E4M3 codes.
_FLOAT16_TO_BF16 = tl.constexpr("""{
    .reg .b16 h0, h1; .reg .f32 f0, f1; mov.b32 {h0, h1}, $1; cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;
    cvt.rn.bf16x2.f32 $0, f1, f0;
}""")


@triton.jit  # type: ignore[untyped-decorator]
def _to_operand(codes, dtype: tl.constexpr, CVT: tl.constexpr):  # type: ignore
    """E4M3 as int8 to `dtype` (bfloat16, float16), exactly; to float32 in the interpreter."""
    if INTERPRET:
        operand = decode_e4m3(codes)
    elif dtype == tl.bfloat16 and not CVT:
        operand = tl.inline_asm_elementwise(
            _E4M3_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        operand = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if dtype == tl.bfloat16:
            operand = tl.inline_asm_elementwise(
                _FLOAT16_TO_BF16, "=r,r", [operand], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    return operand


@triton.jit  # type: ignore[untyped-decorator]
def _load_codes(pointers, columns, start, k, EVEN_K: tl.constexpr):  # type: ignore
    """One step of codes, which are read once."""
    if EVEN_K:
        return tl.load(pointers + start, eviction_policy="evict_first")
    return tl.load(pointers + start, mask=columns < k - start, other=0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _load_scales(scales, start, k, BLOCK_K: tl.constexpr):  # type: ignore
    """The scale of every 16 columns from `start` on: [BLOCK_K / 16] float32."""
    block = (start + 16 * tl.arange(0, BLOCK_K // 16)) // 128
    return widen(tl.load(scales + tl.minimum(block, tl.cdiv(k, 128) - 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(values, scale, x, columns, start, k, EVEN_K: tl.constexpr):  # type: ignore
    """values [BLOCK_N, BLOCK_K] times a row of x, summed over 16 columns, scaled: [BLOCK_N, BLOCK_K / 16]"""
    if EVEN_K:
        row = tl.load(x + start + columns, eviction_policy="evict_last")
    else:
        row = tl.load(x + start + columns, mask=columns < k - start, other=0.0)
    products = values * widen(row)[None, :]
    sixteens = tl.reshape(products, (values.shape[0], values.shape[1] // 16, 16))
    return tl.sum(sixteens, 2) * scale[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore
    sum0, sum1, sum2, sum3, values, scale, x, columns, start, k, stride_x,
    M: tl.constexpr, EVEN_K: tl.constexpr,
):
    """The sums of M rows of x after one more step."""
    sum0 += _multiply(values, scale, x, columns, start, k, EVEN_K)
    if M > 1:
        sum1 += _multiply(values, scale, x + stride_x, columns, start, k, EVEN_K)
    if M > 2:
        sum2 += _multiply(values, scale, x + 2 * stride_x, columns, start, k, EVEN_K)
    if M > 3:
        sum3 += _multiply(values, scale, x + 3 * stride_x, columns, start, k, EVEN_K)
    return sum0, sum1, sum2, sum3


@triton.jit  # type: ignore[untyped-decorator]
def w8a16_vector(  # type: ignore
    x, codes, scales, bias, y, parts, tickets, n, k, stride_x, stride_y,
    M: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):
    """Torch twin: `fp8_dequantize_matmul_torch`."""
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = tile * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    kept = rows < n - first
    columns = tl.arange(0, BLOCK_K)
    # Rows beyond the weight read its last row again and are never stored.
    pointers = codes + first.to(tl.int64) * k
    pointers = pointers + tl.minimum(rows, n - first - 1)[:, None] * k + columns[None, :]
    # A tile starts at a multiple of its height, so that all its rows are in one block of 128.
    scales += (first // 128).to(tl.int64) * tl.cdiv(k, 128)
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, k)

    sum0 = tl.zeros((BLOCK_N, BLOCK_K // 16), tl.float32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    if STAGES == 1:
        loaded = _load_codes(pointers, columns[None, :], begin, k, EVEN_K)
        if PDL:
            gdc_wait()
        for start in tl.range(begin, end - BLOCK_K, BLOCK_K, num_stages=1):
            following = _load_codes(pointers, columns[None, :], start + BLOCK_K, k, EVEN_K)
            scale = _load_scales(scales, start, k, BLOCK_K)
            values = decode_e4m3(loaded)
            sum0, sum1, sum2, sum3 = _add(
                sum0, sum1, sum2, sum3, values, scale, x, columns, start, k, stride_x, M, EVEN_K
            )
            loaded = following
        start = begin + (tl.cdiv(end - begin, BLOCK_K) - 1) * BLOCK_K
        scale = _load_scales(scales, start, k, BLOCK_K)
        values = decode_e4m3(loaded)
        sum0, sum1, sum2, sum3 = _add(
            sum0, sum1, sum2, sum3, values, scale, x, columns, start, k, stride_x, M, EVEN_K
        )
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            scale = _load_scales(scales, start, k, BLOCK_K)
            values = decode_e4m3(_load_codes(pointers, columns[None, :], start, k, EVEN_K))
            sum0, sum1, sum2, sum3 = _add(
                sum0, sum1, sum2, sum3, values, scale, x, columns, start, k, stride_x, M, EVEN_K
            )

    if BIAS:
        added = widen(tl.load(bias + first + rows, mask=kept, other=0.0))
    else:
        added = tl.zeros((BLOCK_N,), tl.float32)
    dtype: tl.constexpr = y.dtype.element_ty
    y += first + rows
    sums = (sum0, sum1, sum2, sum3)
    if SPLITS == 1:
        for m in tl.static_range(M):
            tl.store(y + m * stride_y, narrow(tl.sum(sums[m], 1) + added, dtype), mask=kept)
    else:
        # parts [tiles, SPLITS, M, BLOCK_N]
        mine = parts + (tile * SPLITS + split) * M * BLOCK_N + rows
        for m in tl.static_range(M):
            tl.store(mine + m * BLOCK_N, tl.sum(sums[m], 1))
        if is_last(tickets, tile, SPLITS):
            for m in tl.static_range(M):
                total = tl.zeros((BLOCK_N,), tl.float32)
                for s in tl.static_range(SPLITS):
                    part = parts + ((tile * SPLITS + s) * M + m) * BLOCK_N + rows
                    total += tl.load(part, cache_modifier=".cg")
                tl.store(y + m * stride_y, narrow(total + added, dtype), mask=kept)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def w8a16_dot(  # type: ignore
    x, codes, scales, bias, y, parts, tickets, n, k, stride_x, stride_y, m,
    M_PAD: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr,
    CVT: tl.constexpr,
):
    """Torch twin: `fp8_dequantize_matmul_torch`."""
    # A step is one product for every block of 128 columns, each with its own scale.
    WIDTH: tl.constexpr = min(BLOCK_K, 128)
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = tile * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, M_PAD)
    columns = tl.arange(0, WIDTH)
    read = tl.minimum(rows, n - first - 1)
    codes += first.to(tl.int64) * k
    if BLOCK_N > 128:
        scales += ((first + read) // 128).to(tl.int64) * tl.cdiv(k, 128)
        # One scale a row of the tile; otherwise all its rows are in one block.
        scales = scales[:, None] if SWAP else scales[None, :]
    else:
        scales += (first // 128).to(tl.int64) * tl.cdiv(k, 128)
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, k)
    dtype: tl.constexpr = x.dtype.element_ty
    if PDL:
        gdc_wait()
    # total is [tokens, rows], or [rows, tokens] with SWAP.
    if SWAP:
        total = tl.zeros((BLOCK_N, M_PAD), tl.float32)
        for step in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            for i in tl.static_range(BLOCK_K // WIDTH):
                start = step + i * WIDTH
                # A whole block beyond K (possible only where i > 0) has no scale; its codes and x are zero.
                scale = widen(tl.load(scales + tl.minimum(start, k - 1) // 128))
                weights = _load_codes(
                    codes + read[:, None] * k + columns[None, :], columns[None, :], start, k, EVEN_K
                )
                wanted = (tokens < m)[None, :] & (columns < k - start)[:, None]
                if EVEN_K:
                    wanted = (tokens < m)[None, :]
                values = tl.load(
                    x + start + tokens[None, :] * stride_x + columns[:, None], mask=wanted, other=0.0
                )
                if INTERPRET:
                    values = widen(values)
                total += tl.dot(_to_operand(weights, dtype, CVT), values, input_precision="ieee") * scale
        kept = (rows < n - first)[:, None] & (tokens < m)[None, :]
        to_y = tokens[None, :] * tl.cast(stride_y, tl.int64) + first + rows[:, None]
        to_part = tokens[None, :] * BLOCK_N + rows[:, None]
    else:
        total = tl.zeros((M_PAD, BLOCK_N), tl.float32)
        for step in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            for i in tl.static_range(BLOCK_K // WIDTH):
                start = step + i * WIDTH
                scale = widen(tl.load(scales + tl.minimum(start, k - 1) // 128))
                weights = _load_codes(
                    codes + read[None, :] * k + columns[:, None], columns[:, None], start, k, EVEN_K
                )
                wanted = (tokens < m)[:, None] & (columns < k - start)[None, :]
                if EVEN_K:
                    wanted = (tokens < m)[:, None]
                values = tl.load(
                    x + start + tokens[:, None] * stride_x + columns[None, :], mask=wanted, other=0.0
                )
                if INTERPRET:
                    values = widen(values)
                total += tl.dot(values, _to_operand(weights, dtype, CVT), input_precision="ieee") * scale
        kept = (rows < n - first)[None, :] & (tokens < m)[:, None]
        to_y = tokens[:, None] * tl.cast(stride_y, tl.int64) + first + rows[None, :]
        to_part = tokens[:, None] * BLOCK_N + rows[None, :]

    if BIAS:
        added = widen(tl.load(bias + first + rows, mask=rows < n - first, other=0.0))
        added = added[:, None] if SWAP else added[None, :]
    if SPLITS > 1:
        # parts [tiles, SPLITS, M_PAD, BLOCK_N], of which the first m rows are used
        parts += (tile * SPLITS).to(tl.int64) * M_PAD * BLOCK_N + to_part
        tl.store(parts + split * M_PAD * BLOCK_N, total, mask=kept)
        if is_last(tickets, tile, SPLITS):
            total = tl.zeros_like(total)
            for s in tl.static_range(SPLITS):
                total += tl.load(parts + s * M_PAD * BLOCK_N, mask=kept, other=0.0, cache_modifier=".cg")
            if BIAS:
                total += added
            tl.store(y + to_y, narrow(total, y.dtype.element_ty), mask=kept)
    else:
        if BIAS:
            total += added
        tl.store(y + to_y, narrow(total, y.dtype.element_ty), mask=kept)
