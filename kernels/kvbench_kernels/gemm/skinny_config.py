"""Which products with few rows the skinny kernels take, and with which tiles. Pure: no torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench_kernels.support import Accepted, Rejected

M_MAX = 16
VECTOR_M_MAX = 4
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Tiling:
    """How one launch cuts y[M, N] = x[M, K] @ w[N, K]^T.

    kind: "vector" = FP32 multiply-adds on weights in registers (M <= 4), "dot" = tensor cores, M padded to
    16. block_n rows of w by block_k columns are one step of a CTA; splits CTAs share a row of tiles along K.
    stages: 1 = "vector" loads the next step into registers while it works on this one; more = a ring in
    shared memory. swap ("dot" only): the weights are the left operand, so that 64 rows of them can be one
    wgmma. pdl: programmatic dependent launch (compute capability 9.0, ignored elsewhere); the CTAs start
    while the kernel before still runs and wait for it only before they read x. "vector" with stages 1 has its
    first weights under way by then, so no kernel right before it may write the weights.
    """

    kind: Literal["vector", "dot"]
    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 1
    swap: bool = False
    pdl: bool = False


def supports_skinny(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether skinny_linear takes x [m, k] and w [n, k] of `dtype` ("bfloat16", "float16")."""
    if dtype not in DTYPES:
        return Rejected(
            "dtype", f"dtype {dtype} has no skinny product; it takes {', '.join(DTYPES)}. Use F.linear."
        )
    if not 1 <= m <= M_MAX:
        return Rejected(
            "rows",
            f"{m} rows of x are outside 1 to {M_MAX}, where reading the weights is what takes the time.",
        )
    if n < 1 or k < 8 or k % 8:
        return Rejected(
            "shape",
            f"A weight of {n} x {k} has rows that are no whole number of 16-byte loads; K must be a "
            "multiple of 8.",
        )
    return Accepted()


# Fastest tiling measured (benchmarks/linear.py) for rows of x up to the first number, rows of weights,
# columns; those of Qwen3-8B. Without early launch: among the small kernels of a layer it cost time (107 us a
# layer against 104 at M = 1). H200, torch 2.11.0, triton 3.6.0, 2026-11-29.
MEASURED: dict[tuple[int, int, int], Tiling] = {
    (1, 6144, 4096): Tiling("vector", 4, 1024, stages=3),  # 14.4 us, cuBLAS 29.2
    (2, 6144, 4096): Tiling("dot", 16, 256, warps=1, stages=4),  # 15.1 us, cuBLAS 28.8
    (4, 6144, 4096): Tiling("dot", 16, 256, warps=1, stages=4),  # 15.2 us, cuBLAS 29.0
    (8, 6144, 4096): Tiling("dot", 16, 256, warps=1, stages=4),  # 15.4 us, cuBLAS 29.2
    (16, 6144, 4096): Tiling("dot", 32, 256, warps=2, stages=4),  # 15.8 us, cuBLAS 29.9
    (1, 24576, 4096): Tiling("vector", 8, 1024, stages=3),  # 48.8 us, cuBLAS 56.1
    (2, 24576, 4096): Tiling("dot", 32, 128, warps=2, stages=4),  # 48.9 us, cuBLAS 54.8
    (4, 24576, 4096): Tiling("dot", 32, 128, warps=2, stages=4),  # 48.9 us, cuBLAS 55.2
    (8, 24576, 4096): Tiling("dot", 32, 128, warps=2, stages=4),  # 49.2 us, cuBLAS 55.4
    (16, 24576, 4096): Tiling("dot", 32, 128, warps=2, stages=4),  # 49.4 us, cuBLAS 55.6
    (1, 4096, 4096): Tiling("vector", 8, 512, stages=4),  # 10.6 us, cuBLAS 13.5
    (2, 4096, 4096): Tiling("dot", 64, 128, splits=2, stages=4, swap=True),  # 11.1 us, cuBLAS 13.3
    (4, 4096, 4096): Tiling("dot", 64, 128, splits=2, stages=4, swap=True),  # 11.2 us, cuBLAS 13.3
    (8, 4096, 4096): Tiling("dot", 64, 128, splits=2, stages=4, swap=True),  # 11.2 us, cuBLAS 13.3
    (16, 4096, 4096): Tiling("dot", 64, 128, splits=2, stages=4, swap=True),  # 11.3 us, cuBLAS 13.5
    (1, 4096, 12288): Tiling("vector", 8, 512, stages=4),  # 25.2 us, cuBLAS 30.2
    (2, 4096, 12288): Tiling("dot", 64, 128, splits=2, stages=6, swap=True),  # 26.4 us, cuBLAS 30.0
    (4, 4096, 12288): Tiling("dot", 16, 512, warps=2, stages=3),  # 26.7 us, cuBLAS 30.2
    (8, 4096, 12288): Tiling("dot", 16, 512, warps=2, stages=3),  # 26.7 us, cuBLAS 30.6
    (16, 4096, 12288): Tiling("dot", 64, 128, splits=2, stages=6, swap=True),  # 27.2 us, cuBLAS 28.9
    (1, 151936, 4096): Tiling("vector", 4, 1024, stages=4),  # 281.0 us, cuBLAS 288.7
    (2, 151936, 4096): Tiling("dot", 64, 128, stages=4, swap=True),  # 274.9 us, cuBLAS 286.1
    (4, 151936, 4096): Tiling("dot", 64, 128, stages=4, swap=True),  # 277.1 us, cuBLAS 288.0
    (8, 151936, 4096): Tiling("dot", 128, 128, stages=3),  # 278.2 us, cuBLAS 289.3
    (16, 151936, 4096): Tiling("dot", 128, 128, stages=3),  # 281.0 us, cuBLAS 293.3
}
_M_MEASURED = (1, 2, 4, 8, 16)


def config(m: int, n: int, k: int) -> Tiling:
    """The tiling for x [m, k] and n rows of weights in all (of one weight, or of several in one launch)."""
    bucket = next((top for top in _M_MEASURED if m <= top), M_MAX)
    measured = MEASURED.get((bucket, n, k))
    return measured if measured is not None else _default(m, n, k)


def _default(m: int, n: int, k: int) -> Tiling:
    """For shapes that were not measured."""
    if m <= 1:
        return Tiling("vector", 4, 1024, warps=4)
    if m <= VECTOR_M_MAX:
        return Tiling("vector", 4, 512, warps=2)
    block_n = 64 if n >= 64 else 16
    tiles = -(-n // block_n)
    # About four CTAs a multiprocessor (an H200 has 132).
    splits = max(1, min(8, -(-k // 256), 528 // tiles))
    return Tiling("dot", block_n, 256, splits=splits, warps=4, stages=3)
