"""Products of two FP8 operands with block scales, y[M, N] = x @ w^T + bias, on FP8 tensor cores.

x has a scale a row and 128 columns (`activation.quantize_activation`), w one a 128x128 block. Hopper's FP8
tensor cores keep about 14 bits of a sum, so each block of 128 columns is summed from zero, multiplied by both
scales and added in FP32. With splits > 1 several CTAs share a tile along K: each stores its FP32 part, and
the last to arrive adds the parts in the order of K. Results are the same bits on every call."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kvbench_kernels.checks import expect, expect_columns
from kvbench_kernels.gemm import blockwise
from kvbench_kernels.gemm.blockwise import BLOCK, SCALE_DTYPES
from kvbench_kernels.gemm.w8a8_config import BLOCKS_M, BLOCKS_N, Tiling, config
from kvbench_kernels.kv.convert import INTERPRET, decode_e4m3, narrow, widen
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl, is_last, multiprocessors, shared_tiles, splits_used

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def w8a8_torch(
    x: Tensor, scales_x: Tensor, w: Tensor, scales_w: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Torch twin of `w8a8`: the product of the dequantized operands in float32, rounded once."""
    y = blockwise.dequantize_activation(x, scales_x) @ blockwise.dequantize_blocks(w, scales_w).t()
    launched("fp8_matmul_w8a8_torch")
    return (y if bias is None else y + bias.float()).to(out_dtype)


def _integers(codes: Tensor) -> Any:
    """Triton's interpreter has no true E4M3: there the codes are int8."""
    return codes if codes.is_cuda else codes.view(torch.int8)


def _check(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    if w.dim() != 2 or x.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"Codes are {list(x.shape)} and {list(w.shape)}; they must be [M, K] and [N, K].")
    (m, k), n, device = x.shape, w.shape[0], x.device
    if n < 1 or k < 16 or k % 16:
        raise ValueError(f"A weight is {n} x {k}; it takes N >= 1 and a multiple of 16 as K. Use F.linear.")
    expect("codes_x", x, (m, k), (torch.float8_e4m3fn,), device)
    expect("codes_w", w, (n, k), (torch.float8_e4m3fn,), device)
    expect_columns("scales_x", sx, m, blockwise.blocks(k), device)
    expect("scales_w", sw, blockwise.scale_shape(n, k), SCALE_DTYPES, device)
    if dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {dtype}; it takes bfloat16, float16 or float32.")
    if bias is not None:
        expect("bias", bias, (n,), (dtype,), device)


# fmt: off
def w8a8(
    codes_x: Tensor, scales_x: Tensor, codes_w: Tensor, scales_w: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, tiling: Tiling | None = None, out: Tensor | None = None,
) -> Tensor:
    """codes_x [M, K], codes_w [N, K] float8_e4m3fn, bias [N] in out_dtype or None -> [M, N] in out_dtype.

    scales_x [M, ceil(K/128)] float32 in the layout of `empty_activation_scales`; scales_w [ceil(N/128),
    ceil(K/128)] contiguous, one of `SCALE_DTYPES`. out: where to store the result (dense last axis).
    ValueError for other arguments. With splits > 1, calls on one device must be on one stream at a time
    (they share their tickets). Torch twin: `w8a8_torch`.
    """
    _check(codes_x, scales_x, codes_w, scales_w, bias, out_dtype)
    (m, k), n = codes_x.shape, codes_w.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=codes_x.device)
    expect("out", out, (m, n), (out_dtype,), codes_x.device, "with a dense last axis")
    if m == 0:
        return out
    tiling = tiling or config(m, n, k)
    blocks_m, blocks_n = (BLOCKS_M, (64, 128)) if tiling.swap else ((64, 128), BLOCKS_N)
    if tiling.block_m not in blocks_m or tiling.block_n not in blocks_n:
        raise ValueError(
            f"A tile of {tiling.block_m} rows of x by {tiling.block_n} of the weight has no kernel; block_n "
            "is 64, 128 or, without swap, 256; block_m 64 or 128, with swap also 16 or 32."
        )
    tiles = triton.cdiv(m, tiling.block_m) * triton.cdiv(n, tiling.block_n)
    splits = splits_used(tiling, k)
    parts, tickets = shared_tiles(out, tiles, splits, tiling.block_m, tiling.block_n)
    programs = tiles * splits
    if tiling.ctas:
        programs = min(programs, tiling.ctas * multiprocessors(out.device))
    # The copy engine wants rows and the first byte at multiples of 16.
    tma = tiling.tma and codes_x.data_ptr() % 16 == 0 and codes_w.data_ptr() % 16 == 0
    x, w = _integers(codes_x), _integers(codes_w)
    if tma:
        x = TensorDescriptor.from_tensor(blockwise.with_rows_behind(x), [tiling.block_m, BLOCK])
        w = TensorDescriptor.from_tensor(w, [min(tiling.block_n, BLOCK), BLOCK])
    pdl = tiling.pdl and has_pdl(out.device)
    compiled = fp8_matmul_w8a8[(programs,)](
        x, scales_x, w, _integers(codes_w), scales_w, out if bias is None else bias, out, parts, tickets, m,
        n, k, scales_x.stride(1) // 4, out.stride(0), splits, tiling.group,
        BIAS=bias is not None, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, SPLIT=splits > 1,
        SWAP=tiling.swap, EVEN_K=k % BLOCK == 0, TMA=tma, WALK=tiling.ctas > 0, PDL=pdl,
        PREFETCH=pdl and tiling.prefetch, num_warps=tiling.warps, num_stages=tiling.stages,
        maxnreg=tiling.registers or None, **({"launch_pdl": True} if pdl else {}),
    )
    launched(fp8_matmul_w8a8.fn.__name__, compiled)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _codes(operand, first, start, rows, columns, k, EVEN_K: tl.constexpr, TMA: tl.constexpr):  # type: ignore
    """[rows, 128] codes from column `start` on, 0 beyond the last; rows beyond the last are undefined.

    operand: a tensor descriptor with TMA, else a pointer to row `first`; rows: which ones to read there."""
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
    """Codes [A, 128] and [B, 128] -> [A, B] float32: left times right transposed."""
    if INTERPRET:
        return tl.dot(decode_e4m3(left), tl.trans(decode_e4m3(right)), input_precision="ieee")
    return tl.dot(left, tl.trans(right))


@triton.jit  # type: ignore[untyped-decorator]
def _place(item, m, n, splits, group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore
    """(tile, its first row of x, its first row of w) of a work item, which is one split of a tile."""
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
    """Fetch the first 512 columns of an item's weights into L2 while the previous kernel runs."""
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
        )


@triton.jit  # type: ignore[untyped-decorator]
def _sum(parts, kept, splits, PART: tl.constexpr):  # type: ignore
    """The sum of a tile's parts, PART elements apart, in the order of K."""
    total = tl.load(parts, mask=kept, other=0.0, cache_modifier=".cg")
    for s in range(1, splits):
        total += tl.load(parts + s * PART, mask=kept, other=0.0, cache_modifier=".cg")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _result(  # type: ignore
    total, first_m, first_n, bias, y, m, n, stride_y,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr, SWAP: tl.constexpr,
):
    """Store a finished tile."""
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
):
    """Compute one work item."""
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
    # Rows in fours, as the columns of scales are padded (NumPy would warn of what lies there).
    EACH: tl.constexpr = 1 if INTERPRET else 4
    sx += first_m + tl.minimum(rows // EACH, (m - first_m - 1) // EACH) * EACH + rows % EACH
    block_n = first_n // 128
    sw0 = sw + block_n.to(tl.int64) * k_blocks
    sw1 = sw + tl.minimum(block_n + 1, tl.cdiv(n, 128) - 1).to(tl.int64) * k_blocks

    # A total is [rows of x, rows of w], transposed with SWAP; total1 is for the columns from 128 on.
    total0 = tl.zeros((HALF, BLOCK_M) if SWAP else (BLOCK_M, HALF), tl.float32)
    total1 = total0
    # Scales are loaded a step ahead.
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
):
    """x [m, k], w [n, k]: codes, as pointers or (TMA) descriptors; w_memory: a pointer; sx, sw: scales."""
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
            )
    else:
        _item(
            tl.program_id(0), x, sx, w, sw, bias, y, parts, tickets, m, n, k, fours_sx, stride_y, splits,
            group, BIAS, BLOCK_M, BLOCK_N, SPLIT, SWAP, EVEN_K, TMA,
        )
