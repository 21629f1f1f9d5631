"""Paged prefill attention: the new tokens of each sequence against all its pages, their own included.

Grid (tile of query rows, query head, sequence). The new K and V must be in the pages before the call. Tiles
that every query row sees need no mask; those at the diagonal or at a window's edge have one."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench_kernels.attention import tiles
from kvbench_kernels.kv.convert import narrow
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.launches import launched


# fmt: off
def paged_prefill(
    cache: LayerPages, q: Tensor, table: Tensor, lengths: Tensor, query_starts: Tensor, max_new: int,
    scaling: float, *, sliding_window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, reads: Tensor | None = None,
) -> Tensor:
    """q [N, Hq, D], packed -> [N, Hq, Dv] in q's dtype. Causal.

    query_starts [B + 1] int32: rows query_starts[b] to query_starts[b + 1] are the last tokens of sequence b.
    max_new: the most such rows of a sequence; rows beyond it, and rows of no sequence, are not written. Other
    arguments as in paged_decode.
    """
    tiles.check_arguments(cache, q, table, lengths, sliding_window, softcap, sinks, reads)
    if query_starts.dtype != torch.int32 or len(query_starts) != len(lengths) + 1:
        raise ValueError(
            f"Query starts {query_starts.dtype} {tuple(query_starts.shape)} for {len(lengths)} sequences; "
            "they must be int32, one more than the sequences."
        )
    batch, (tokens, q_heads, _) = lengths.shape[0], q.shape
    out = torch.empty(tokens, q_heads, cache.v.shape[3], dtype=q.dtype, device=q.device)
    if batch == 0 or max_new < 1:
        return out
    options = tiles.kernel_options(cache, q_heads, q.dtype)
    tuning = _tuning(options, max_new)
    compiled = paged_prefill_causal[(triton.cdiv(max_new, tuning["M"]), q_heads, batch)](
        q, *cache[1:], table, lengths, query_starts, sinks, reads, out,
        scaling, sliding_window, q.stride(0), q.stride(1), table.stride(0), **options, SOFTCAP=softcap,
        **tuning,
    )
    launched(paged_prefill_causal.fn.__name__, compiled)
    return out


def _tuning(options: dict[str, Any], max_new: int) -> dict[str, int]:
    """Query rows and keys a tile, warps and stages: the largest that spill no registers on sm_90, except for
    8-bit pages of heads above 128."""
    if options["OPERAND"] == tl.float32:  # plain multiply-adds, no tensor cores
        return {"M": 32, "N": 16, "num_warps": 8, "num_stages": 1}
    if max(options["BD"], options["BV"]) > 128:
        return {"M": 64, "N": 32, "num_warps": 4, "num_stages": 2}
    if max_new <= 64:
        return {"M": 64, "N": 64, "num_warps": 4, "num_stages": 2}
    return {"M": 128, "N": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["window", "table_stride"])
def paged_prefill_causal(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, starts_ptr, sinks_ptr, reads_ptr,
    out_ptr, scaling, window, q_stride_row, q_stride_head, table_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr, SCALES: tl.constexpr, EIGHT_BIT: tl.constexpr,
    SOFTCAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):
    # The last tiles have the most keys; they start first.
    tile_row = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    kv_head = head // (Q_HEADS // KV_HEADS)
    length = tl.load(lengths_ptr + row)
    start = tl.load(starts_ptr + row)
    new = tl.load(starts_ptr + row + 1) - start
    tiles.add_reads(reads_ptr, length, (tile_row == 0) & (head == 0), EIGHT_BIT)

    if tile_row * M < new:
        query = tile_row * M + tl.arange(0, M)
        d = tl.arange(0, BD)
        q_at = q_ptr + tiles.wide_offset(start + query, q_stride_row) + tiles.wide_offset(head, q_stride_head)
        q = tl.load(q_at[:, None] + d[None, :], mask=(query < new)[:, None] & (d < D)[None, :], other=0.0)
        q, factor = tiles.query_operand(q, scaling, OPERAND)
        if SCALES == "tensor":
            factor *= tl.load(k_scale_ptr)

        first = length - new + tile_row * M  # position of the tile's first query
        # Rows beyond the last query are not stored; they get its position, so that a window leaves them keys.
        position = tl.minimum(first + tl.arange(0, M), length - 1)
        end = tl.minimum(first + M, length)
        # Every row sees the tiles before `whole`; with a window it only skips what no row sees.
        whole = (first + 1) // N if window is None else tl.maximum(first - window + 1, 0) // N
        acc, m, total, unit = tiles.start_state(M, BV)
        table = table_ptr + tiles.wide_offset(row, table_stride)
        if window is None:
            for tile in range(whole):
                j = tile * N + tl.arange(0, N)
                inside = j < length
                acc, m, total, unit = tiles.attend_tile(
                    acc, m, total, unit, q, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, j,
                    inside, inside[None, :], KV_HEADS, PAGE, D, DV, BD, BV, OPERAND, SCALES, SOFTCAP, False,
                )
        for tile in range(whole, tl.cdiv(end, N)):
            j = tile * N + tl.arange(0, N)
            inside = j < end
            visible = j[None, :] <= position[:, None]
            if window is not None:
                inside = inside & (j > first - window)
                visible = visible & (j[None, :] > position[:, None] - window)
            visible = visible & inside[None, :]
            acc, m, total, unit = tiles.attend_tile(
                acc, m, total, unit, q, factor, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, j,
                inside, visible, KV_HEADS, PAGE, D, DV, BD, BV, OPERAND, SCALES, SOFTCAP, True,
            )
        acc = tiles.in_ones(acc, unit, v_scale_ptr, SCALES)
        if sinks_ptr is not None:
            acc, total = tiles.add_sink(acc, m, total, tl.load(sinks_ptr + head))
        v = tl.arange(0, BV)
        at = tiles.wide_offset(tiles.wide_offset(start + query, Q_HEADS) + head, DV)
        result = narrow(acc / total[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] + v[None, :], result, mask=(query < new)[:, None] & (v < DV)[None, :])
