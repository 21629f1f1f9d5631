"""The kernels of w8a16.py: E4M3 codes widened in registers and multiplied by 16-bit x, the scale of a block
in FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvbench_kernels.kv.convert import INTERPRET, decode_e4m3, narrow, widen
from kvbench_kernels.splitk import is_last

# Four E4M3 codes to four bfloat16. Sign, exponent and significand go to their places in bfloat16, where the
# bias is 120 larger (exact, subnormal codes too); 0x7F would come out as 480. The last two steps make it a
# NaN: times 1.07 * 2^119 only 480 overflows, and infinity times zero is a NaN while anything else adds
# nothing.
_E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, z;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 a, a, 0x80008000, c, 0xEA;
    lop3.b32 b, b, 0x80008000, d, 0xEA;
    mov.b32 c, 0x7B807B80;
    mul.rn.bf16x2 a, a, c;
    mul.rn.bf16x2 b, b, c;
    mov.b32 d, 0x7B097B09;
    mul.rn.bf16x2 c, a, d;
    mul.rn.bf16x2 d, b, d;
    mov.b32 z, 0;
    fma.rn.bf16x2 $0, c, z, a;
    fma.rn.bf16x2 $1, d, z, b;
}""")

# Two float16 to two bfloat16 over float32, for values that bfloat16 holds exactly (every E4M3 code is one).
_FLOAT16_TO_BF16 = tl.constexpr("""{
    .reg .b16 h0, h1;
    .reg .f32 f0, f1;
    mov.b32 {h0, h1}, $1;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.rn.bf16x2.f32 $0, f1, f0;
}""")


@triton.jit  # type: ignore[untyped-decorator]
def _to_operand(codes, dtype: tl.constexpr, CVT: tl.constexpr):  # type: ignore
    """E4M3 as int8 to `dtype` (bfloat16, float16), exactly; to float32 in the interpreter, whose bfloat16 is
    none.
    """
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
    """One step of codes; each is read once, so it is the first to leave the caches."""
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
    """values [BLOCK_N, BLOCK_K] times one row of x, added over every 16 columns and scaled: [BLOCK_N, BLOCK_K
    / 16].
    """
    if EVEN_K:
        row = tl.load(x + start + columns, eviction_policy="evict_last")
    else:
        row = tl.load(x + start + columns, mask=columns < k - start, other=0.0)
    products = values * widen(row)[None, :]
    sixteens = tl.reshape(products, (values.shape[0], values.shape[1] // 16, 16))
    return tl.sum(sixteens, 2) * scale[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def w8a16_vector(  # type: ignore
    x, codes, scales, bias, y, parts, tickets, n, k, stride_x, stride_y,
    M: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    pointers = (
        codes + first.to(tl.int64) * k + tl.minimum(rows, n - first - 1)[:, None] * k + columns[None, :]
    )
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
            sum0 += _multiply(values, scale, x, columns, start, k, EVEN_K)
            if M > 1:
                sum1 += _multiply(values, scale, x + stride_x, columns, start, k, EVEN_K)
            if M > 2:
                sum2 += _multiply(values, scale, x + 2 * stride_x, columns, start, k, EVEN_K)
            if M > 3:
                sum3 += _multiply(values, scale, x + 3 * stride_x, columns, start, k, EVEN_K)
            loaded = following
        start = begin + (tl.cdiv(end - begin, BLOCK_K) - 1) * BLOCK_K
        scale = _load_scales(scales, start, k, BLOCK_K)
        values = decode_e4m3(loaded)
        sum0 += _multiply(values, scale, x, columns, start, k, EVEN_K)
        if M > 1:
            sum1 += _multiply(values, scale, x + stride_x, columns, start, k, EVEN_K)
        if M > 2:
            sum2 += _multiply(values, scale, x + 2 * stride_x, columns, start, k, EVEN_K)
        if M > 3:
            sum3 += _multiply(values, scale, x + 3 * stride_x, columns, start, k, EVEN_K)
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            scale = _load_scales(scales, start, k, BLOCK_K)
            values = decode_e4m3(_load_codes(pointers, columns[None, :], start, k, EVEN_K))
            sum0 += _multiply(values, scale, x, columns, start, k, EVEN_K)
            if M > 1:
                sum1 += _multiply(values, scale, x + stride_x, columns, start, k, EVEN_K)
            if M > 2:
                sum2 += _multiply(values, scale, x + 2 * stride_x, columns, start, k, EVEN_K)
            if M > 3:
                sum3 += _multiply(values, scale, x + 3 * stride_x, columns, start, k, EVEN_K)

    if BIAS:
        added = widen(tl.load(bias + first + rows, mask=kept, other=0.0))
    else:
        added = tl.zeros((BLOCK_N,), tl.float32)
    dtype: tl.constexpr = y.dtype.element_ty
    y += first + rows
    if SPLITS == 1:
        tl.store(y, narrow(tl.sum(sum0, 1) + added, dtype), mask=kept)
        if M > 1:
            tl.store(y + stride_y, narrow(tl.sum(sum1, 1) + added, dtype), mask=kept)
        if M > 2:
            tl.store(y + 2 * stride_y, narrow(tl.sum(sum2, 1) + added, dtype), mask=kept)
        if M > 3:
            tl.store(y + 3 * stride_y, narrow(tl.sum(sum3, 1) + added, dtype), mask=kept)
    else:
        # parts [tiles, SPLITS, M, BLOCK_N]
        mine = parts + (tile * SPLITS + split) * M * BLOCK_N + rows
        tl.store(mine, tl.sum(sum0, 1))
        if M > 1:
            tl.store(mine + BLOCK_N, tl.sum(sum1, 1))
        if M > 2:
            tl.store(mine + 2 * BLOCK_N, tl.sum(sum2, 1))
        if M > 3:
            tl.store(mine + 3 * BLOCK_N, tl.sum(sum3, 1))
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
):  # fmt: skip
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
