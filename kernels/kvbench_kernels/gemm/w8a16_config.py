"""Which products with FP8 weights and few rows the W8A16 kernels take, and with which tiles. Pure: no torch,
no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench_kernels.support import Accepted, Rejected

M_MAX = 128
VECTOR_M_MAX = 4
BLOCK = 128
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Tiling:
    """How one launch cuts y[M, N] = x[M, K] @ dequantized codes[N, K]^T.

    kind: "vector" = FP32 multiply-adds on weights in registers (M <= 4), "dot" = tensor cores, M padded to
    16, 32, .. block_n rows of codes by block_k columns are one step of a CTA; splits CTAs share a row of
    tiles along K. block_k is a power of two, so that a step is a part of a block of 128 or several whole
    ones. stages: 1 = "vector" loads the next step into registers while it works on this one; more = a ring in
    shared memory. swap ("dot" only): the weights are the left operand, so that 64 rows of them can be one
    wgmma. pdl: programmatic dependent launch (compute capability 9.0, ignored elsewhere); the CTAs start
    while the kernel before still runs and wait for it only before they read x. "vector" with stages 1 has its
    first weights under way by then, so no kernel right before it may write the weights. cvt ("dot" with
    bfloat16 only): codes become bfloat16 by the conversion instructions, over float16 and float32; otherwise
    by moving their bits, which is more instructions of another kind.
    """

    kind: Literal["vector", "dot"]
    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 1
    swap: bool = False
    pdl: bool = False
    cvt: bool = True


def supports_w8a16(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether w8a16 takes x [m, k] of `dtype` ("bfloat16", "float16", "float32") and codes [n, k]."""
    if dtype == "float32" and m > VECTOR_M_MAX:
        return Rejected(
            "dtype",
            f"{m} rows of float32 would need float32 tensor cores; W8A16 takes 1 to {VECTOR_M_MAX} of them, "
            f"or {', '.join(DTYPES)}. Use fp8_dequantize_matmul_torch.",
        )
    if dtype not in (*DTYPES, "float32"):
        return Rejected(
            "dtype",
            f"dtype {dtype} has no W8A16 product; it takes {', '.join(DTYPES)}, float32. "
            "Use fp8_dequantize_matmul_torch.",
        )
    if not 1 <= m <= M_MAX:
        return Rejected(
            "rows",
            f"{m} rows of x are outside 1 to {M_MAX}, where reading the weights is what takes the time.",
        )
    if n < 1 or k < 16 or k % 16:
        return Rejected(
            "shape",
            f"A weight of {n} x {k} has rows that are no whole number of 16-byte loads; K must be a "
            "multiple of 16.",
        )
    return Accepted()


# Fastest tiling measured for rows of x up to the first number, rows of codes, columns.
# H200, torch 2.11.0, triton 3.6.0, 2026-11-29; times of the run, cuBLAS in bfloat16 beside.
MEASURED: dict[tuple[int, int, int], Tiling] = {
    (1, 24576, 4096): Tiling("vector", 16, 512, stages=4),  # 26.2 us, cuBLAS 48.0
    (2, 24576, 4096): Tiling("dot", 64, 128, stages=4),  # 27.0 us, cuBLAS 48.0
    (4, 24576, 4096): Tiling("dot", 64, 128, stages=4),  # 27.0 us, cuBLAS 48.1
    (8, 24576, 4096): Tiling("dot", 64, 128, stages=4),  # 27.2 us, cuBLAS 53.5
    (16, 24576, 4096): Tiling("dot", 64, 128, stages=4),  # 27.4 us, cuBLAS 48.7
    (32, 24576, 4096): Tiling("dot", 64, 128, stages=3, swap=True),  # 32.3 us, cuBLAS 49.5
    (64, 24576, 4096): Tiling("dot", 64, 128, stages=3, swap=True),  # 39.0 us, cuBLAS 50.5
    (1, 6144, 4096): Tiling("vector", 16, 512, stages=4),  # 8.6 us, cuBLAS 16.5
    (2, 6144, 4096): Tiling("vector", 16, 512, stages=3),  # 9.8 us, cuBLAS 16.3
    (4, 6144, 4096): Tiling("dot", 32, 128, splits=4, warps=2, stages=4),  # 10.4 us, cuBLAS 16.0
    (8, 6144, 4096): Tiling("dot", 32, 128, splits=4, warps=2, stages=4),  # 10.3 us, cuBLAS 15.6
    (16, 6144, 4096): Tiling("dot", 32, 128, splits=4, warps=2, stages=4),  # 10.5 us, cuBLAS 15.9
    (32, 6144, 4096): Tiling("dot", 64, 128, splits=4, stages=3, swap=True),  # 12.5 us, cuBLAS 16.1
    (64, 6144, 4096): Tiling("dot", 64, 128, splits=4, stages=3, swap=True),  # 17.4 us, cuBLAS 16.3
    (1, 4096, 12288): Tiling("vector", 8, 512, warps=2, stages=4),  # 14.3 us, cuBLAS 30.3
    (2, 4096, 12288): Tiling("vector", 8, 1024, stages=3),  # 15.8 us, cuBLAS 30.3
    (4, 4096, 12288): Tiling("dot", 64, 128, splits=4, warps=2, stages=6, swap=True),  # 16.3 us, cuBLAS 30.3
    (8, 4096, 12288): Tiling("dot", 64, 128, splits=4, warps=2, stages=6, swap=True),  # 16.6 us, cuBLAS 30.3
    (16, 4096, 12288): Tiling("dot", 64, 128, splits=4, warps=2, stages=6, swap=True),  # 17.0 us, cuBLAS 28.6
    (32, 4096, 12288): Tiling("dot", 64, 128, splits=8, warps=2, stages=4, swap=True),  # 21.5 us, cuBLAS 29.6
    (64, 4096, 12288): Tiling("dot", 64, 128, splits=4, stages=3, swap=True),  # 26.6 us, cuBLAS 31.7
    (1, 4096, 4096): Tiling("vector", 8, 512, warps=2, stages=4),  # 6.6 us, cuBLAS 13.4
    (2, 4096, 4096): Tiling("vector", 8, 1024, stages=3),  # 7.8 us, cuBLAS 13.2
    (4, 4096, 4096): Tiling("dot", 64, 128, splits=4, warps=2, stages=4, swap=True),  # 8.1 us, cuBLAS 13.2
    (8, 4096, 4096): Tiling("dot", 64, 128, splits=4, warps=2, stages=6, swap=True),  # 8.1 us, cuBLAS 13.1
    (16, 4096, 4096): Tiling("dot", 32, 128, splits=4, warps=2, stages=4),  # 8.3 us, cuBLAS 13.2
    (32, 4096, 4096): Tiling("dot", 64, 128, splits=4, stages=3, swap=True),  # 10.4 us, cuBLAS 13.7
    (64, 4096, 4096): Tiling("dot", 64, 256, splits=2, stages=3, swap=True),  # 12.8 us, cuBLAS 11.9
}
M_MEASURED = (1, 2, 4, 8, 16, 32, 64)


def config(m: int, n: int, k: int) -> Tiling:
    """The tiling for x [m, k] and codes [n, k]."""
    bucket = next((top for top in M_MEASURED if m <= top), M_MAX)
    measured = MEASURED.get((bucket, n, k))
    return measured if measured is not None else _default(m, n, k)


def _default(m: int, n: int, k: int) -> Tiling:
    """For shapes that were not measured."""
    if m <= 2:
        return Tiling("vector", 8, 1024 if k >= 1024 else 256, warps=4, stages=3)
    if n < 64:
        return Tiling("dot", 16, 128, warps=1, stages=4)
    block_n = 64 if m <= 32 or n < 16384 else 128
    tiles = -(-n // block_n)
    # About two CTAs a multiprocessor (an H200 has 132).
    splits = max(1, min(4, -(-k // 512), 264 // tiles))
    return Tiling("dot", block_n, 128, splits=splits, warps=4, stages=4, swap=True)


def rows_padded(m: int) -> int:
    """Rows that "dot" multiplies for m rows of x."""
    return next(rows for rows in (16, 32, 64, 128) if m <= rows)
