"""Linear layers with few rows: y[M, N] = x[M, K] @ w[N, K]^T + bias[N], M <= 16, at the speed of reading w.

Torch twin: F.linear. Both kernels accumulate in FP32 in a fixed order: the same bits on every call.

- `skinny_linear_vector` (M <= 4): the weights go to registers in 16-byte loads and are multiplied there.
- `skinny_linear_dot` (M <= 16): x is padded to 16 rows and the tensor cores multiply.

A launch takes up to three weights that share x (q, k, v; gate, up). Its CTAs are numbered over the tiles of
all of them, so that a small weight does not leave the GPU idle; nothing is copied or concatenated. With
splits > 1 several CTAs share a tile along K: each stores its FP32 part, and the last to arrive adds the parts
in the order of K."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvbench_kernels.checks import expect
from kvbench_kernels.gemm.skinny_config import M_MAX, VECTOR_M_MAX, Tiling, config
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl, is_last, shared_tiles, splits_used

WEIGHTS_MAX = 3


def skinny_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None) -> Tensor:
    """x [..., K] of at most 16 rows, w [N, K], bias [N] or None -> [..., N] in x's dtype.

    Raises ValueError for shapes, dtypes or layouts the kernels do not take. With splits > 1, calls on one
    device must be on one stream at a time (they share their tickets).
    """
    return skinny_linear_many(x, (w,), None if bias is None else (bias,), tiling)[0]


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
    """float32 passes, as the tests' oracle; supports_skinny refuses it."""
    m, k = x.shape
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # Triton's interpreter multiplies the bit patterns of bfloat16.
        raise ValueError("The skinny products take no bfloat16 in the interpreter; use float16 or float32.")
    if not 1 <= len(weights) <= WEIGHTS_MAX:
        raise ValueError(f"{len(weights)} weights were given; one launch takes 1 to {WEIGHTS_MAX}.")
    if not 1 <= m <= M_MAX or k < 8 or k % 8:
        raise ValueError(f"x has {m} rows of {k}; it takes 1 to {M_MAX} rows of a multiple of 8.")
    expect("x", x, (m, k), (x.dtype,), x.device, "with a dense last axis")
    for w in weights:
        expect("weight", w, (w.shape[0], k), (x.dtype,), x.device)
    for w, b in zip(weights, biases or (), strict=biases is not None):
        expect("bias", b, w.shape[:1], (x.dtype,), x.device)


# fmt: off
def skinny_linear_many(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, tiling: Tiling | None = None
) -> tuple[Tensor, ...]:
    """As `skinny_linear` for up to three weights [N_i, K], in one launch -> one [..., N_i] a weight."""
    k = x.shape[-1]
    flat = x.reshape(-1, k)
    m = flat.shape[0]
    _check(flat, weights, biases)
    rows = [w.shape[0] for w in weights]
    tiling = tiling or config(m, sum(rows), k)
    if tiling.kind == "vector" and m > VECTOR_M_MAX:
        raise ValueError(f"A vector tiling takes 1 to {VECTOR_M_MAX} rows of x, not {m}; use kind 'dot'.")
    outs = [x.new_empty((*x.shape[:-1], n)) for n in rows]
    tiles, splits = sum(-(-n // tiling.block_n) for n in rows), splits_used(tiling, k)
    height = m if tiling.kind == "vector" else M_MAX
    parts, tickets = shared_tiles(outs[0], tiles, splits, height, tiling.block_n)
    pdl = tiling.pdl and has_pdl(x.device)

    def three(items: list[Any]) -> list[Any]:
        return items + items[:1] * (WEIGHTS_MAX - len(items))

    ws = three([*weights])
    bs = ws if biases is None else three([*biases])
    arguments = (flat, *ws, *bs, *three(outs), parts, tickets, *three(rows), k, flat.stride(0))
    options: dict[str, Any] = {
        "WEIGHTS": len(rows), "BIAS": biases is not None, "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k, "SPLITS": splits, "STAGES": tiling.stages,
        "EVEN_K": k % tiling.block_k == 0, "PDL": pdl, "num_warps": tiling.warps,
        **({"launch_pdl": True} if pdl else {}),
    }
    kernel = skinny_linear_vector if tiling.kind == "vector" else skinny_linear_dot
    if tiling.kind == "vector":
        compiled = kernel[(tiles, splits)](*arguments, M=m, **options)
    else:
        compiled = kernel[(tiles, splits)](*arguments, m, SWAP=tiling.swap, **options)
    launched(kernel.fn.__name__, compiled)
    return tuple(outs)


@triton.jit  # type: ignore[untyped-decorator]
def _of_tile(tile, n0, n1, n2, a0, a1, a2, BLOCK_N: tl.constexpr, WEIGHTS: tl.constexpr):  # type: ignore
    """(first row of the tile, rows, item of a0, a1, a2) of the weight that `tile` belongs to."""
    a, n, first = a0, n0, tile * BLOCK_N
    if WEIGHTS > 1:
        end = tl.cdiv(n0, BLOCK_N)
        inside = tile >= end
        a = tl.where(inside, a1, a)
        n = tl.where(inside, n1, n)
        first = tl.where(inside, (tile - end) * BLOCK_N, first)
        if WEIGHTS > 2:
            end += tl.cdiv(n1, BLOCK_N)
            inside = tile >= end
            a = tl.where(inside, a2, a)
            n = tl.where(inside, n2, n)
            first = tl.where(inside, (tile - end) * BLOCK_N, first)
    return first, n, a


@triton.jit  # type: ignore[untyped-decorator]
def _load_weights(pointers, columns, start, k, EVEN_K: tl.constexpr):  # type: ignore
    """One step of weights, which are read once."""
    if EVEN_K:
        return tl.load(pointers + start, eviction_policy="evict_first")
    return tl.load(pointers + start, mask=columns < k - start, other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _load_x(x, columns, start, k, EVEN_K: tl.constexpr):  # type: ignore
    if EVEN_K:
        return tl.load(x + start + columns, eviction_policy="evict_last").to(tl.float32)
    return tl.load(x + start + columns, mask=columns < k - start, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore
    sum0, sum1, sum2, sum3, values, x, columns, start, k, stride_x, M: tl.constexpr, EVEN_K: tl.constexpr
):
    """The sums of M rows of x after one more step."""
    sum0 += values * _load_x(x, columns, start, k, EVEN_K)[None, :]
    if M > 1:
        sum1 += values * _load_x(x + stride_x, columns, start, k, EVEN_K)[None, :]
    if M > 2:
        sum2 += values * _load_x(x + 2 * stride_x, columns, start, k, EVEN_K)[None, :]
    if M > 3:
        sum3 += values * _load_x(x + 3 * stride_x, columns, start, k, EVEN_K)[None, :]
    return sum0, sum1, sum2, sum3


@triton.jit  # type: ignore[untyped-decorator]
def skinny_linear_vector(  # type: ignore
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, parts, tickets, n0, n1, n2, k, stride_x,
    M: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first, n, w = _of_tile(tile, n0, n1, n2, w0, w1, w2, BLOCK_N, WEIGHTS)
    _, _, y = _of_tile(tile, n0, n1, n2, y0, y1, y2, BLOCK_N, WEIGHTS)
    rows = tl.arange(0, BLOCK_N)
    kept = rows < n - first
    columns = tl.arange(0, BLOCK_K)
    # Rows beyond the weight read its last row again and are never stored.
    pointers = w + first.to(tl.int64) * k + tl.minimum(rows, n - first - 1)[:, None] * k + columns[None, :]
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, k)

    sum0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    if STAGES == 1:
        weights = _load_weights(pointers, columns[None, :], begin, k, EVEN_K)
        if PDL:
            gdc_wait()
        for start in tl.range(begin, end - BLOCK_K, BLOCK_K, num_stages=1):
            following = _load_weights(pointers, columns[None, :], start + BLOCK_K, k, EVEN_K)
            values = weights.to(tl.float32)
            sum0, sum1, sum2, sum3 = _add(
                sum0, sum1, sum2, sum3, values, x, columns, start, k, stride_x, M, EVEN_K
            )
            weights = following
        start = begin + (tl.cdiv(end - begin, BLOCK_K) - 1) * BLOCK_K
        values = weights.to(tl.float32)
        sum0, sum1, sum2, sum3 = _add(
            sum0, sum1, sum2, sum3, values, x, columns, start, k, stride_x, M, EVEN_K
        )
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            values = _load_weights(pointers, columns[None, :], start, k, EVEN_K).to(tl.float32)
            sum0, sum1, sum2, sum3 = _add(
                sum0, sum1, sum2, sum3, values, x, columns, start, k, stride_x, M, EVEN_K
            )

    if BIAS:
        _, _, b = _of_tile(tile, n0, n1, n2, b0, b1, b2, BLOCK_N, WEIGHTS)
        bias = tl.load(b + first + rows, mask=kept, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BLOCK_N,), tl.float32)
    y += first + rows
    sums = (sum0, sum1, sum2, sum3)
    if SPLITS == 1:
        for m in tl.static_range(M):
            tl.store(y + m * n, tl.sum(sums[m], 1) + bias, mask=kept)
    else:
        # parts [tiles, SPLITS, M, BLOCK_N]
        mine = parts + (tile * SPLITS + split) * M * BLOCK_N + rows
        for m in tl.static_range(M):
            tl.store(mine + m * BLOCK_N, tl.sum(sums[m], 1))
        if is_last(tickets, tile, SPLITS):
            for m in tl.static_range(M):
                total = bias
                for s in tl.static_range(SPLITS):
                    part = parts + ((tile * SPLITS + s) * M + m) * BLOCK_N + rows
                    total += tl.load(part, cache_modifier=".cg")
                tl.store(y + m * n, total, mask=kept)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def skinny_linear_dot(  # type: ignore
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, parts, tickets, n0, n1, n2, k, stride_x, m,
    WEIGHTS: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr,
):
    M_PAD: tl.constexpr = 16
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first, n, w = _of_tile(tile, n0, n1, n2, w0, w1, w2, BLOCK_N, WEIGHTS)
    _, _, y = _of_tile(tile, n0, n1, n2, y0, y1, y2, BLOCK_N, WEIGHTS)
    rows = tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, M_PAD)
    columns = tl.arange(0, BLOCK_K)
    read = tl.minimum(rows, n - first - 1)
    w += first.to(tl.int64) * k
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, k)
    if PDL:
        gdc_wait()
    # total is [tokens, rows], or [rows, tokens] with SWAP.
    if SWAP:
        total = tl.zeros((BLOCK_N, M_PAD), tl.float32)
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            pointers = w + read[:, None] * k + columns[None, :]
            weights = _load_weights(pointers, columns[None, :], start, k, EVEN_K)
            wanted = (tokens < m)[None, :] & (columns < k - start)[:, None]
            at = x + start + tokens[None, :] * stride_x + columns[:, None]
            values = tl.load(at, mask=wanted, other=0.0)
            total = tl.dot(weights, values, total, input_precision="ieee")
        kept = (rows < n - first)[:, None] & (tokens < m)[None, :]
        to_y = tokens[None, :] * n + first + rows[:, None]
        to_part = tokens[None, :] * BLOCK_N + rows[:, None]
    else:
        total = tl.zeros((M_PAD, BLOCK_N), tl.float32)
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            pointers = w + read[None, :] * k + columns[:, None]
            weights = _load_weights(pointers, columns[:, None], start, k, EVEN_K)
            wanted = (tokens < m)[:, None] & (columns < k - start)[None, :]
            at = x + start + tokens[:, None] * stride_x + columns[None, :]
            values = tl.load(at, mask=wanted, other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        kept = (rows < n - first)[None, :] & (tokens < m)[:, None]
        to_y = tokens[:, None] * n + first + rows[None, :]
        to_part = tokens[:, None] * BLOCK_N + rows[None, :]

    if BIAS:
        _, _, b = _of_tile(tile, n0, n1, n2, b0, b1, b2, BLOCK_N, WEIGHTS)
        bias = tl.load(b + first + rows, mask=rows < n - first, other=0.0).to(tl.float32)
        bias = bias[:, None] if SWAP else bias[None, :]
    if SPLITS == 1:
        if BIAS:
            total += bias
        tl.store(y + to_y, total, mask=kept)
    else:
        # parts [tiles, SPLITS, M_PAD, BLOCK_N], of which the first m rows are used
        parts += tile * SPLITS * M_PAD * BLOCK_N + to_part
        tl.store(parts + split * M_PAD * BLOCK_N, total, mask=kept)
        if is_last(tickets, tile, SPLITS):
            total = tl.zeros_like(total)
            for s in tl.static_range(SPLITS):
                total += tl.load(parts + s * M_PAD * BLOCK_N, mask=kept, other=0.0, cache_modifier=".cg")
            if BIAS:
                total += bias
            tl.store(y + to_y, total, mask=kept)
