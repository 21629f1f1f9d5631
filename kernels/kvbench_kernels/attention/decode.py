"""Paged decode attention in portable Triton: one query token a sequence, split along the keys.

Grid (sequence, KV head x tile of its query heads, split). Each program runs an online softmax over its share
of a sequence's tiles. It reads the length on the device, so a captured graph stays right while sequences
grow. With one split it writes the output; with more, a second kernel combines float32 partial results. A
row's result depends only on its own tokens and on `splits`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench_kernels.attention import tiles
from kvbench_kernels.kv.convert import narrow, widen
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.launches import launched

LEAST_SPLIT = 128  # tokens; below it the combine costs more than the split saves
LONG_SPLIT = 4096  # tokens; longer shares leave SMs idle when one sequence is much longer than the rest


def choose_splits(batch: int, kv_heads: int, max_length: int, sms: int) -> int:
    """Splits for about two programs an SM, none shorter than 128 tokens; max_length: of any sequence."""
    waves = 2 * sms // max(batch * kv_heads, 1)
    wanted = max(waves, triton.cdiv(max_length, LONG_SPLIT), 1)
    return int(min(wanted, max(triton.cdiv(max_length, LEAST_SPLIT), 1)))


# fmt: off
def paged_decode(
    cache: LayerPages, q: Tensor, table: Tensor, lengths: Tensor, scaling: float, *, splits: int,
    sliding_window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    reads: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, Dv] in q's dtype: each query is at the last token of its sequence.

    table [B, P] int32: page ids; entries beyond a sequence's length are never read. lengths [B] int32: tokens
    to attend to, the query's own included; 0 gives zeros. softcap, sinks [Hq]: as in paged_attention_torch.
    reads [2] int64: the tokens of each sequence are added to the first, and to the second if the pages have 8
    bits. splits: programs along a sequence, 1 = off. ValueError for other arguments.
    """
    tiles.check_arguments(cache, q, table, lengths, sliding_window, softcap, sinks, reads)
    if splits < 1:
        raise ValueError(f"{splits} splits; give 1 (off) or more, as choose_splits does.")
    batch, q_heads, _ = q.shape
    if batch != len(lengths):
        raise ValueError(f"{batch} queries for {len(lengths)} sequences; decode takes one query a sequence.")
    kv_heads, value_dim = cache.v.shape[1], cache.v.shape[3]
    out = torch.empty(batch, q_heads, value_dim, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    group = q_heads // kv_heads
    rows = 16 if group <= 16 else 32
    options = tiles.kernel_options(cache, q_heads, q.dtype)
    partial = statistics = None
    if splits > 1:
        partial = torch.empty(batch, q_heads, splits, value_dim, dtype=torch.float32, device=q.device)
        statistics = torch.empty(batch, q_heads, splits, 2, dtype=torch.float32, device=q.device)
    compiled = paged_decode_split[(batch, kv_heads * triton.cdiv(group, rows), splits)](
        q, *cache[1:], table, lengths, sinks, reads, out, partial, statistics,
        scaling, sliding_window, splits, q.stride(0), q.stride(1), table.stride(0),
        **options, SOFTCAP=softcap, M=rows, **_tuning(options),
    )
    launched(paged_decode_split.fn.__name__, compiled, splits)
    if splits > 1:
        compiled = paged_decode_combine[(batch, q_heads)](
            partial, statistics, lengths, sinks, out, splits, Q_HEADS=q_heads, DV=value_dim, BV=options["BV"],
            CHUNK=16, num_warps=4,
        )
        launched(paged_decode_combine.fn.__name__, compiled)
    return out


def _tuning(options: dict[str, Any]) -> dict[str, int]:
    """Keys a tile, warps and stages: the largest tile that spills no registers on sm_90."""
    wide = max(options["BD"], options["BV"]) > 128
    if options["OPERAND"] == tl.float32:  # plain multiply-adds, no tensor cores
        return {"N": 16, "num_warps": 8, "num_stages": 1}
    return {"N": 32 if wide else 64, "num_warps": 4, "num_stages": 3}


@triton.jit(do_not_specialize=["window", "splits", "table_stride"])
def paged_decode_split(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, sinks_ptr, reads_ptr, out_ptr,
    partial_ptr, statistics_ptr, scaling, window, splits, q_stride_row, q_stride_head, table_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr, SCALES: tl.constexpr, EIGHT_BIT: tl.constexpr,
    SOFTCAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + M - 1) // M
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    tiles.add_reads(reads_ptr, length, (tl.program_id(1) == 0) & (split == 0), EIGHT_BIT)

    in_group = (tl.program_id(1) % HEAD_TILES) * M + tl.arange(0, M)
    head = kv_head * GROUP + in_group
    d = tl.arange(0, BD)
    q_at = q_ptr + tiles.wide_offset(row, q_stride_row)
    q_at = q_at + tiles.wide_offset(head, q_stride_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=(in_group < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    q, factor = tiles.query_operand(q, scaling, OPERAND)
    if SCALES == "tensor":
        factor *= tl.load(k_scale_ptr)

    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    # Shares of whole tiles that differ by one at most.
    first_tile = first // N
    count = tl.cdiv(length, N) - first_tile
    begin = first_tile + count * split // splits
    end = first_tile + count * (split + 1) // splits
    acc, m, total, unit = tiles.start_state(M, BV)
    table = table_ptr + tiles.wide_offset(row, table_stride)
    for tile in range(begin, end):
        j = tile * N + tl.arange(0, N)
        inside = j < length
        if window is not None:
            inside = inside & (j >= first)
        acc, m, total, unit = tiles.attend_tile(
            acc, m, total, unit, q, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, j, inside,
            inside[None, :], KV_HEADS, PAGE, D, DV, BD, BV, OPERAND, SCALES, SOFTCAP, True,
        )
    acc = tiles.in_ones(acc, unit, v_scale_ptr, SCALES)

    v = tl.arange(0, BV)
    out_row = tiles.wide_offset(row, Q_HEADS) + head
    stored = (in_group < GROUP)[:, None] & (v < DV)[None, :]
    if partial_ptr is not None:
        at = out_row * splits + split
        tl.store(statistics_ptr + at * 2, m, mask=in_group < GROUP)
        tl.store(statistics_ptr + at * 2 + 1, total, mask=in_group < GROUP)
        # A split without a tile stores zeros, so that the combine need not wait for statistics.
        tl.store(partial_ptr + at[:, None] * DV + v[None, :], acc, mask=stored)
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=in_group < GROUP, other=0.0)
            acc, total = tiles.add_sink(acc, m, total, sink)
        # 0 / 0 is 0 only without tokens: with tokens whose weights are all 0 it stays NaN.
        result = acc / tl.where(length > 0, total, 1.0)[:, None]
        result = narrow(result, out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * DV + v[None, :], result, mask=stored)


@triton.jit(do_not_specialize=["splits"])
def paged_decode_combine(
    partial_ptr, statistics_ptr, lengths_ptr, sinks_ptr, out_ptr, splits,
    Q_HEADS: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    out_row = tiles.wide_offset(row, Q_HEADS) + head
    at = statistics_ptr + out_row * splits * 2
    # The largest logit first, so that the sum does not depend on the number of chunks.
    m = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        m = tl.maximum(m, tl.load(at + split * 2, mask=split < splits, other=float("-inf")))
    largest = tl.max(m, 0)
    if sinks_ptr is not None:
        sink = widen(tl.load(sinks_ptr + head)) * tiles.LOG2E
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    v = tl.arange(0, BV)
    acc = tl.zeros([CHUNK, BV], tl.float32)
    weights = tl.zeros([CHUNK], tl.float32)
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        m = tl.load(at + split * 2, mask=split < splits, other=float("-inf"))
        total = tl.load(at + split * 2 + 1, mask=split < splits, other=0.0)
        scale = tl.exp2(m - largest)
        part_at = partial_ptr + (out_row * splits + split)[:, None] * DV + v[None, :]
        part = tl.load(part_at, mask=(split < splits)[:, None] & (v < DV)[None, :], other=0.0)
        acc += part * scale[:, None]
        weights += total * scale
    result = tl.sum(acc, 0)
    weight = tl.sum(weights, 0)
    if sinks_ptr is not None:
        weight += tl.exp2(sink - largest)
    result = result / tl.where(tl.load(lengths_ptr + row) > 0, weight, 1.0)
    tl.store(out_ptr + out_row * DV + v, narrow(result, out_ptr.dtype.element_ty), mask=v < DV)
