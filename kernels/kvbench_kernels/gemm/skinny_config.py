"""Which products with few rows the skinny kernels take, and their tilings. Imports no torch and no triton."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

from kvbench_kernels.support import Accepted, Rejected, supports_product

M_MAX = 16
VECTOR_M_MAX = 4
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Tiling:
    """How one launch of a product with few rows divides y[M, N] = x[M, K] @ w[N, K]^T.

    kind: "vector" = FP32 multiply-adds on weights in registers (M <= 4), "dot" = tensor cores, M padded. A
    CTA takes block_n rows of w by block_k columns in a step (block_k is a power of two); splits CTAs share a
    tile along K. stages: 1 = "vector" loads the next step into registers during this one; more = a ring in
    shared memory. swap ("dot"): the weights are the left operand, so that 64 rows of them fill one wgmma.
    pdl: programmatic dependent launch (compute capability 9.0, ignored elsewhere): the CTAs start before the
    previous kernel ends and wait for it only before they read x. "vector" with stages 1 reads its first
    weights before that, so the previous kernel must not write the weights. cvt (W8A16 "dot" in bfloat16):
    convert codes with the conversion instructions, over float16 and float32, instead of moving their bits.
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


def supports_skinny(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether skinny_linear takes x [m, k] and w [n, k] of `dtype`."""
    return supports_product("skinny", m, n, k, dtype, DTYPES, M_MAX, 8)


# (rows of x up to, rows of weights, columns) -> the fastest tiling (benchmarks/linear.py) at the shapes of
# Qwen3-8B. Without early launch, which made a layer slower (107 us against 104 at M = 1).
# H200, torch 2.11.0, triton 3.6.0, 2026-11-29.
MEASURED: dict[tuple[int, int, int], Tiling] = {
    (1, 6144, 4096): Tiling("vector", 4, 1024, stages=3),  # 14.4 us, cuBLAS 29.2
    (8, 6144, 4096): Tiling("dot", 16, 256, warps=1, stages=4),  # 15.1-15.4 us, cuBLAS 28.8-29.2
    (16, 6144, 4096): Tiling("dot", 32, 256, warps=2, stages=4),  # 15.8 us, cuBLAS 29.9
    (1, 24576, 4096): Tiling("vector", 8, 1024, stages=3),  # 48.8 us, cuBLAS 56.1
    (16, 24576, 4096): Tiling("dot", 32, 128, warps=2, stages=4),  # 48.9-49.4 us, cuBLAS 54.8-55.6
    (1, 4096, 4096): Tiling("vector", 8, 512, stages=4),  # 10.6 us, cuBLAS 13.5
    (16, 4096, 4096): Tiling("dot", 64, 128, splits=2, stages=4, swap=True),  # 11.1-11.3 us, cuBLAS 13.3-13.5
    (1, 4096, 12288): Tiling("vector", 8, 512, stages=4),  # 25.2 us, cuBLAS 30.2
    (2, 4096, 12288): Tiling("dot", 64, 128, splits=2, stages=6, swap=True),  # 26.4 us, cuBLAS 30.0
    (8, 4096, 12288): Tiling("dot", 16, 512, warps=2, stages=3),  # 26.7, 26.7 us, cuBLAS 30.2, 30.6
    (16, 4096, 12288): Tiling("dot", 64, 128, splits=2, stages=6, swap=True),  # 27.2 us, cuBLAS 28.9
    (1, 151936, 4096): Tiling("vector", 4, 1024, stages=4),  # 281.0 us, cuBLAS 288.7
    (4, 151936, 4096): Tiling("dot", 64, 128, stages=4, swap=True),  # 274.9, 277.1 us, cuBLAS 286.1, 288.0
    (16, 151936, 4096): Tiling("dot", 128, 128, stages=3),  # 278.2, 281.0 us, cuBLAS 289.3, 293.3
}


T = TypeVar("T")


def measured(table: Mapping[tuple[int, int, int], T], m: int, n: int, k: int) -> T | None:
    """The first tiling of the table for at least m rows of x and a weight [n, k]."""
    return next((t for (rows, *shape), t in table.items() if m <= rows and shape == [n, k]), None)


@cache
def config(m: int, n: int, k: int) -> Tiling:
    """The tiling for x [m, k] and n rows of weights (the sum over all weights of the launch)."""
    if found := measured(MEASURED, m, n, k):
        return found
    if m <= VECTOR_M_MAX:
        return Tiling("vector", 4, 1024) if m <= 1 else Tiling("vector", 4, 512, warps=2)
    block_n = 64 if n >= 64 else 16
    # About four CTAs a multiprocessor (an H200 has 132).
    splits = max(1, min(8, -(-k // 256), 528 // -(-n // block_n)))
    return Tiling("dot", block_n, 256, splits=splits, stages=3)
