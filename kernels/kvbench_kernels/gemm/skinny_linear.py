"""Linear layers with few rows: y[M, N] = x[M, K] @ w[N, K]^T + bias[N], M <= 16, at the speed of reading w.

Two kernels, both with FP32 accumulation and a fixed order of summation (the same bits on every call):

- `skinny_linear_vector` (M <= 4): the weights go to registers in 16-byte loads and are multiplied there.
- `skinny_linear_dot` (M <= 16): x is padded to 16 rows and the tensor cores multiply.

A launch takes up to three weights that share x (q, k, v; gate, up). Its CTAs are numbered over the tiles of
all of them, so that a small weight does not leave the GPU idle; nothing is copied or concatenated. With
splits > 1 several CTAs share a tile along K: each stores its FP32 part, and the one that comes last adds the
parts in the order of K."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvbench_kernels.checks import expect
from kvbench_kernels.gemm.skinny_config import M_MAX, VECTOR_M_MAX, Tiling, config
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl, is_last, tickets_of
from kvbench_kernels.splits import splits_used

WEIGHTS_MAX = 3


@triton.jit  # type: ignore[untyped-decorator]
def _of_tile(tile, n0, n1, n2, a0, a1, a2, BLOCK_N: tl.constexpr, WEIGHTS: tl.constexpr):  # type: ignore
    """Of the weight that `tile` belongs to: (the tile's first row, its rows, its item of a0, a1, a2)."""
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
    """One step of weights; each is read once, so it is the first to leave the caches."""
    if EVEN_K:
        return tl.load(pointers + start, eviction_policy="evict_first")
    return tl.load(pointers + start, mask=columns < k - start, other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _load_x(x, columns, start, k, EVEN_K: tl.constexpr):  # type: ignore
    if EVEN_K:
        return tl.load(x + start + columns, eviction_policy="evict_last").to(tl.float32)
    return tl.load(x + start + columns, mask=columns < k - start, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def skinny_linear_vector(  # type: ignore
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, parts, tickets, n0, n1, n2, k, stride_x,
    M: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
            sum0 += values * _load_x(x, columns, start, k, EVEN_K)[None, :]
            if M > 1:
                sum1 += values * _load_x(x + stride_x, columns, start, k, EVEN_K)[None, :]
            if M > 2:
                sum2 += values * _load_x(x + 2 * stride_x, columns, start, k, EVEN_K)[None, :]
            if M > 3:
                sum3 += values * _load_x(x + 3 * stride_x, columns, start, k, EVEN_K)[None, :]
            weights = following
        start = begin + (tl.cdiv(end - begin, BLOCK_K) - 1) * BLOCK_K
        values = weights.to(tl.float32)
        sum0 += values * _load_x(x, columns, start, k, EVEN_K)[None, :]
        if M > 1:
            sum1 += values * _load_x(x + stride_x, columns, start, k, EVEN_K)[None, :]
        if M > 2:
            sum2 += values * _load_x(x + 2 * stride_x, columns, start, k, EVEN_K)[None, :]
        if M > 3:
            sum3 += values * _load_x(x + 3 * stride_x, columns, start, k, EVEN_K)[None, :]
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            values = _load_weights(pointers, columns[None, :], start, k, EVEN_K).to(tl.float32)
            sum0 += values * _load_x(x, columns, start, k, EVEN_K)[None, :]
            if M > 1:
                sum1 += values * _load_x(x + stride_x, columns, start, k, EVEN_K)[None, :]
            if M > 2:
                sum2 += values * _load_x(x + 2 * stride_x, columns, start, k, EVEN_K)[None, :]
            if M > 3:
                sum3 += values * _load_x(x + 3 * stride_x, columns, start, k, EVEN_K)[None, :]

    if BIAS:
        _, _, b = _of_tile(tile, n0, n1, n2, b0, b1, b2, BLOCK_N, WEIGHTS)
        bias = tl.load(b + first + rows, mask=kept, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((BLOCK_N,), tl.float32)
    y += first + rows
    if SPLITS == 1:
        tl.store(y, tl.sum(sum0, 1) + bias, mask=kept)
        if M > 1:
            tl.store(y + n, tl.sum(sum1, 1) + bias, mask=kept)
        if M > 2:
            tl.store(y + 2 * n, tl.sum(sum2, 1) + bias, mask=kept)
        if M > 3:
            tl.store(y + 3 * n, tl.sum(sum3, 1) + bias, mask=kept)
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
):  # fmt: skip
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
            weights = _load_weights(
                w + read[:, None] * k + columns[None, :], columns[None, :], start, k, EVEN_K
            )
            wanted = (tokens < m)[None, :] & (columns < k - start)[:, None]
            values = tl.load(
                x + start + tokens[None, :] * stride_x + columns[:, None], mask=wanted, other=0.0
            )
            total = tl.dot(weights, values, total, input_precision="ieee")
        kept = (rows < n - first)[:, None] & (tokens < m)[None, :]
        to_y = tokens[None, :] * n + first + rows[:, None]
        to_part = tokens[None, :] * BLOCK_N + rows[:, None]
    else:
        total = tl.zeros((M_PAD, BLOCK_N), tl.float32)
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            weights = _load_weights(
                w + read[None, :] * k + columns[:, None], columns[:, None], start, k, EVEN_K
            )
            wanted = (tokens < m)[:, None] & (columns < k - start)[None, :]
            values = tl.load(
                x + start + tokens[:, None] * stride_x + columns[None, :], mask=wanted, other=0.0
            )
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


def skinny_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None) -> Tensor:
    """x [..., K] of at most 16 rows, w [N, K], bias [N] or None -> [..., N] in x's dtype.

    tiling: None for the chosen one. Raises ValueError for shapes, dtypes or layouts the kernels do not take.
    With splits > 1, calls on one device must be on one stream at a time (they share their tickets).
    """
    return skinny_linear_many(x, (w,), None if bias is None else (bias,), tiling)[0]


def skinny_linear_torch(
    x: Tensor, w: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None
) -> Tensor:
    """Torch twin of `skinny_linear`."""
    return F.linear(x, w, bias)


def skinny_linear_many(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, tiling: Tiling | None = None
) -> tuple[Tensor, ...]:
    """Up to three weights [N_i, K] that share x [..., K], in one launch -> one [..., N_i] a weight.

    biases: one [N_i] a weight, or None. Otherwise as `skinny_linear`.
    """
    k = x.shape[-1]
    flat = x.reshape(-1, k)
    m = flat.shape[0]
    _check(flat, weights, biases)
    rows = [w.shape[0] for w in weights]
    if tiling is None:
        tiling = config(m, sum(rows), k)
    if tiling.kind == "vector" and m > VECTOR_M_MAX:
        raise ValueError(f"A vector tiling takes 1 to {VECTOR_M_MAX} rows of x, not {m}; use kind 'dot'.")
    outs = [x.new_empty((*x.shape[:-1], n)) for n in rows]
    tiles = sum(-(-n // tiling.block_n) for n in rows)
    splits = splits_used(tiling, k)
    parts, tickets = outs[0], outs[0]
    if splits > 1:
        height = m if tiling.kind == "vector" else M_MAX
        parts = torch.empty((tiles, splits, height, tiling.block_n), dtype=torch.float32, device=x.device)
        tickets = tickets_of(x.device, tiles)
    pdl = tiling.pdl and x.is_cuda and has_pdl(x.device)
    absent = range(len(rows), WEIGHTS_MAX)
    ws = [*weights, *(weights[0] for _ in absent)]
    bs = ws if biases is None else [*biases, *(biases[0] for _ in absent)]
    ys = [*outs, *(outs[0] for _ in absent)]
    ns = [*rows, *(rows[0] for _ in absent)]
    arguments = (flat, *ws, *bs, *ys, parts, tickets, *ns, k, flat.stride(0))
    blocks = {
        "WEIGHTS": len(rows), "BIAS": biases is not None, "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "SPLITS": splits, "STAGES": tiling.stages, "EVEN_K": k % tiling.block_k == 0, "PDL": pdl,
        "num_warps": tiling.warps,
    }  # fmt: skip
    if pdl:
        blocks["launch_pdl"] = True
    if tiling.kind == "vector":
        compiled = skinny_linear_vector[(tiles, splits)](*arguments, M=m, **blocks)
        launched(skinny_linear_vector.fn.__name__, compiled)
    else:
        compiled = skinny_linear_dot[(tiles, splits)](*arguments, m, SWAP=tiling.swap, **blocks)
        launched(skinny_linear_dot.fn.__name__, compiled)
    return tuple(outs)


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
    """ValueError for what would be read wrongly. float32 passes (the tests' oracle); supports_skinny refuses
    it.
    """
    m, k = x.shape
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # Triton's interpreter multiplies the bit patterns of bfloat16.
        raise ValueError(
            "The skinny products take no bfloat16 in the interpreter; use float16 or float32 there."
        )
    if not 1 <= len(weights) <= WEIGHTS_MAX:
        raise ValueError(f"{len(weights)} weights were given; one launch takes 1 to {WEIGHTS_MAX}.")
    if not 1 <= m <= M_MAX or k < 8 or k % 8:
        raise ValueError(
            f"x has {m} rows of {k}; it takes 1 to {M_MAX} rows of a multiple of 8. Use F.linear."
        )
    if x.stride(1) != 1:
        raise ValueError(
            f"x has a last axis of stride {x.stride(1)}; it must be dense. Call contiguous() on it."
        )
    for w in weights:
        expect("weight", w, (w.shape[0], k), (x.dtype,), x.device)
    for w, b in zip(weights, biases or (), strict=biases is not None):
        expect("bias", b, w.shape[:1], (x.dtype,), x.device)
