"""Which products the W8A16 kernels take, and their tilings. Imports no torch and no triton."""

from functools import cache

from kvbench_kernels.gemm.skinny_config import DTYPES, VECTOR_M_MAX, Tiling, measured
from kvbench_kernels.support import Accepted, Rejected, supports_product

M_MAX = 128


def supports_w8a16(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether w8a16 takes x [m, k] of `dtype` ("bfloat16", "float16", "float32") and codes [n, k]."""
    if dtype == "float32" and m > VECTOR_M_MAX:
        return Rejected("dtype", f"{m} rows of float32; W8A16 takes 1 to {VECTOR_M_MAX} of them.")
    return supports_product("W8A16", m, n, k, dtype, (*DTYPES, "float32"), M_MAX, 16)


# (rows of x up to, rows of codes, columns) -> the fastest tiling, its time and cuBLAS in bfloat16.
# H200, torch 2.11.0, triton 3.6.0, 2026-11-29.
MEASURED: dict[tuple[int, int, int], Tiling] = {
    (1, 24576, 4096): Tiling("vector", 16, 512, stages=4),  # 26.2 us, cuBLAS 48.0
    (16, 24576, 4096): Tiling("dot", 64, 128, stages=4),  # 27.0-27.4 us, cuBLAS 48.0-53.5
    (64, 24576, 4096): Tiling("dot", 64, 128, stages=3, swap=True),  # 32.3, 39.0 us, cuBLAS 49.5, 50.5
    (1, 6144, 4096): Tiling("vector", 16, 512, stages=4),  # 8.6 us, cuBLAS 16.5
    (2, 6144, 4096): Tiling("vector", 16, 512, stages=3),  # 9.8 us, cuBLAS 16.3
    (16, 6144, 4096): Tiling("dot", 32, 128, splits=4, warps=2, stages=4),  # 10.3-10.5 us, cuBLAS 15.6-16.0
    (64, 6144, 4096): Tiling("dot", 64, 128, splits=4, stages=3, swap=True),  # 12.5-17.4 us, cuBLAS 16.1-16.3
    (1, 4096, 12288): Tiling("vector", 8, 512, warps=2, stages=4),  # 14.3 us, cuBLAS 30.3
    (2, 4096, 12288): Tiling("vector", 8, 1024, stages=3),  # 15.8 us, cuBLAS 30.3
    # 16.3-17.0 us, cuBLAS 28.6-30.3:
    (16, 4096, 12288): Tiling("dot", 64, 128, splits=4, warps=2, stages=6, swap=True),
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


@cache
def config(m: int, n: int, k: int) -> Tiling:
    """The tiling for x [m, k] and codes [n, k]."""
    if found := measured(MEASURED, m, n, k):
        return found
    if m <= 2:
        return Tiling("vector", 8, 1024 if k >= 1024 else 256, stages=3)
    if n < 64:
        return Tiling("dot", 16, 128, warps=1, stages=4)
    block_n = 64 if m <= 32 or n < 16384 else 128
    # About two CTAs a multiprocessor (an H200 has 132).
    splits = max(1, min(4, -(-k // 512), 264 // -(-n // block_n)))
    return Tiling("dot", block_n, 128, splits=splits, stages=4, swap=True)


def rows_padded(m: int) -> int:
    """Rows that "dot" computes for m rows of x."""
    return next(rows for rows in (16, 32, 64, 128) if m <= rows)
