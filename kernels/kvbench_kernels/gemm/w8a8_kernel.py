"""The kernel of w8a8.py: products of E4M3 codes, 128 columns at a time, scaled and added in FP32."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvbench_kernels.kv.convert import INTERPRET, decode_e4m3, narrow, widen
from kvbench_kernels.splitk import is_last


@triton.jit  # type: ignore[untyped-decorator]
def _codes(operand, first, start, rows, columns, k, EVEN_K: tl.constexpr, TMA: tl.constexpr):  # type: ignore
    """[rows, 128] codes from column `start` on; 0 beyond the last column. Rows beyond the last are any row's
    or 0.

    operand: a tensor descriptor with TMA, else a pointer to row `first`; rows: what to read there.
    """
    if TMA:
        codes = operand.load([first, start])
    else:
        pointers = operand + start + rows[:, None] * k + columns[None, :]
        if EVEN_K:
            codes = tl.load(pointers)
        else:
            codes = tl.load(pointers, mask=(columns < k - start)[None, :], other=0.0)
    return codes


@triton.jit
def _product(left, right):  # type: ignore
    """left [A, 128] times right [B, 128] transposed, of codes -> [A, B] float32."""
    if INTERPRET:
        return tl.dot(decode_e4m3(left), tl.trans(decode_e4m3(right)), input_precision="ieee")
    return tl.dot(left, tl.trans(right))


@triton.jit  # type: ignore[untyped-decorator]
def _place(item, m, n, splits, group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore
    """Of one split of one tile: (the tile, its first row of x, its first row of w)."""
    tile = item // splits if SPLIT else item
    tiles_m = tl.cdiv(m, BLOCK_M)
    wide = group * tl.cdiv(n, BLOCK_N)
    top = (tile // wide) * group
    height = tl.minimum(tiles_m - top, group)
    first_m = (top + (tile % wide) % height) * BLOCK_M
    first_n = ((tile % wide) // height) * BLOCK_N
    return tile, first_m, first_n


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(  # type: ignore
    item, w, m, n, k, splits, group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr
):
    """Start the first 512 columns of an item's weights to L2 while the previous kernel still runs."""
    _, _, first_n = _place(item, m, n, splits, group, BLOCK_M, BLOCK_N, SPLIT)
    start = 0
    if SPLIT:
        start = (item % splits) * tl.cdiv(tl.cdiv(k, 128), splits) * 128
    if k >= 512:
        rows = tl.minimum(first_n + tl.arange(0, BLOCK_N), n - 1)
        address = (w + rows.to(tl.int64) * k + tl.minimum(start, k - 512)).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
            "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _sum(parts, kept, splits, PART: tl.constexpr):  # type: ignore
    """The parts of a tile, PART elements apart, in the order of K."""
    total = tl.load(parts, mask=kept, other=0.0, cache_modifier=".cg")
    for s in range(1, splits):
        total += tl.load(parts + s * PART, mask=kept, other=0.0, cache_modifier=".cg")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _result(  # type: ignore
    total, first_m, first_n, bias, y, m, n, stride_y,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Stores a finished tile."""
    rows = tl.arange(0, BLOCK_M)
    outs = tl.arange(0, HALF)
    in_m = rows < m - first_m
    in_n = outs < n - first_n
    y += first_m.to(tl.int64) * stride_y + first_n
    rows = rows.to(tl.int64) * stride_y
    if BIAS:
        b = widen(tl.load(bias + first_n + outs, mask=in_n, other=0.0))
    if SWAP:
        if BIAS:
            total += b[:, None]
        y += rows[None, :] + outs[:, None]
        kept = in_n[:, None] & in_m[None, :]
    else:
        if BIAS:
            total += b[None, :]
        y += rows[:, None] + outs[None, :]
        kept = in_m[:, None] & in_n[None, :]
    tl.store(y, narrow(total, y.dtype.scalar.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _item(  # type: ignore
    item, x, sx, w, sw, bias, y, parts, tickets, m, n, k, fours_sx, stride_y, splits, group,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One split of one tile."""
    tile, first_m, first_n = _place(item, m, n, splits, group, BLOCK_M, BLOCK_N, SPLIT)

    HALF: tl.constexpr = min(BLOCK_N, 128)
    rows = tl.arange(0, BLOCK_M)
    outs = tl.arange(0, HALF)
    columns = tl.arange(0, 128)
    in_m = rows < m - first_m
    # Rows beyond the last read the last one again and are never stored.
    read_m = tl.minimum(rows, m - first_m - 1)
    read_n = tl.minimum(outs, n - first_n - 1)
    read_n1 = tl.minimum(outs + HALF, n - first_n - 1)
    if not TMA:
        x += first_m.to(tl.int64) * k
        w += first_n.to(tl.int64) * k
    k_blocks = tl.cdiv(k, 128)
    if SPLIT:
        split = item % splits
        steps = tl.cdiv(k_blocks, splits)
        begin = split * steps
        end = tl.minimum(begin + steps, k_blocks)
    else:
        begin = 0
        end = k_blocks
    # In fours, as the columns of scales are padded; what belongs to no row is not stored. (NumPy would warn
    # of it.)
    EACH: tl.constexpr = 1 if INTERPRET else 4
    sx += first_m + tl.minimum(rows // EACH, (m - first_m - 1) // EACH) * EACH + rows % EACH
    block_n = first_n // 128
    sw0 = sw + block_n.to(tl.int64) * k_blocks
    sw1 = sw + tl.minimum(block_n + 1, tl.cdiv(n, 128) - 1).to(tl.int64) * k_blocks

    # A total is [rows of x, rows of w], or the transpose with SWAP; the second one is of the columns from 128
    # on.
    total0 = tl.zeros((HALF, BLOCK_M) if SWAP else (BLOCK_M, HALF), tl.float32)
    total1 = total0
    # Scales come to registers a step ahead.
    following = tl.load(sx + begin * 4 * fours_sx)
    following0 = tl.load(sw0 + begin)
    following1 = tl.load(sw1 + begin)
    for block in range(begin, end):
        of_rows = following
        scale0 = widen(following0)
        scale1 = widen(following1)
        after = tl.minimum(block + 1, end - 1)
        following = tl.load(sx + after * 4 * fours_sx)
        following0 = tl.load(sw0 + after)
        of_x = _codes(x, first_m, block * 128, read_m, columns, k, EVEN_K, TMA)
        of_w = _codes(w, first_n, block * 128, read_n, columns, k, EVEN_K, TMA)
        if SWAP:
            total0 += _product(of_w, of_x) * (of_rows * scale0)[None, :]
        else:
            total0 += _product(of_x, of_w) * (of_rows * scale0)[:, None]
        if BLOCK_N > HALF:
            following1 = tl.load(sw1 + after)
            of_w1 = _codes(w, first_n + HALF, block * 128, read_n1, columns, k, EVEN_K, TMA)
            total1 += _product(of_x, of_w1) * (of_rows * scale1)[:, None]

    if SPLIT:
        # parts [tiles, splits, BLOCK_N / HALF, BLOCK_M, HALF], of which the rows of x are used
        PART: tl.constexpr = BLOCK_M * BLOCK_N
        if SWAP:
            kept = in_m[None, :]
            parts += rows[None, :] * HALF + outs[:, None]
        else:
            kept = in_m[:, None]
            parts += rows[:, None] * HALF + outs[None, :]
        parts += tile.to(tl.int64) * splits * PART
        tl.store(parts + split * PART, total0, mask=kept)
        if BLOCK_N > HALF:
            tl.store(parts + split * PART + BLOCK_M * HALF, total1, mask=kept)
        if is_last(tickets, tile, splits):
            total0 = _sum(parts, kept, splits, PART)
            _result(total0, first_m, first_n, bias, y, m, n, stride_y, BIAS, BLOCK_M, HALF, SWAP)
            if BLOCK_N > HALF:
                total1 = _sum(parts + BLOCK_M * HALF, kept, splits, PART)
                _result(total1, first_m, first_n + HALF, bias, y, m, n, stride_y, BIAS, BLOCK_M, HALF, SWAP)
    else:
        _result(total0, first_m, first_n, bias, y, m, n, stride_y, BIAS, BLOCK_M, HALF, SWAP)
        if BLOCK_N > HALF:
            _result(total1, first_m, first_n + HALF, bias, y, m, n, stride_y, BIAS, BLOCK_M, HALF, SWAP)


@triton.jit(do_not_specialize=["m", "fours_sx", "splits", "group"])  # type: ignore[untyped-decorator]
def fp8_matmul_w8a8(  # type: ignore
    x, sx, w, w_memory, sw, bias, y, parts, tickets, m, n, k, fours_sx, stride_y, splits, group,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
    WALK: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """x [m, k], w [n, k]: codes; sx, sw: their scales. x and w are pointers or (TMA) tensor descriptors.

    w_memory is w as a pointer in any case.
    """
    if PDL:
        if PREFETCH:
            _prefetch(tl.program_id(0), w_memory, m, n, k, splits, group, BLOCK_M, BLOCK_N, SPLIT)
        gdc_wait()
        gdc_launch_dependents()
    if WALK:
        items = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N) * splits
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
            _item(
                item, x, sx, w, sw, bias, y, parts, tickets, m, n, k, fours_sx, stride_y, splits, group,
                BIAS, BLOCK_M, BLOCK_N, SPLIT, SWAP, EVEN_K, TMA,
            )  # fmt: skip
    else:
        _item(
            tl.program_id(0), x, sx, w, sw, bias, y, parts, tickets, m, n, k, fours_sx, stride_y, splits,
            group, BIAS, BLOCK_M, BLOCK_N, SPLIT, SWAP, EVEN_K, TMA,
        )  # fmt: skip
