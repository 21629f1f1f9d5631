"""Which products of FP8 operands `w8a8` takes, and their tilings. Imports no torch and no triton."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from kvbench_kernels.gemm.skinny_config import measured
from kvbench_kernels.support import Accepted, Rejected, supports_product

DTYPES = ("bfloat16", "float16")
BLOCKS_M = (16, 32, 64, 128)
BLOCKS_N = (64, 128, 256)


@dataclass(frozen=True)
class Tiling:
    """How one launch divides y[M, N] = x[M, K] @ w[N, K]^T. A step along K is one block of 128 columns.

    A tile is block_m rows of x by block_n rows of w; splits CTAs share a tile along K. stages: steps in the
    ring in shared memory. group: rows of tiles that are walked together, column by column, so that
    neighbouring CTAs share operands in L2. swap: the weights are the left operand, so that 64 rows of them
    fill an instruction and block_m may be 16 or 32; otherwise it is at least 64. tma: tiles are copied by the
    bulk copy engine, otherwise by 16-byte copies a thread. ctas: 0 = one CTA a tile; more = that many CTAs a
    multiprocessor, each with several tiles. pdl: programmatic dependent launch (compute capability 9.0,
    ignored elsewhere). registers: limit a thread, 0 = none (128 with 8 warps allow two CTAs a
    multiprocessor). prefetch (with pdl): a CTA fetches its first 512 columns of weights into L2 before the
    previous kernel ends, which therefore must not write the weights.
    """

    block_k: ClassVar[int] = 128
    block_m: int
    block_n: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    group: int = 8
    swap: bool = False
    tma: bool = True
    ctas: int = 0
    pdl: bool = True
    registers: int = 0
    prefetch: bool = False


def supports_w8a8(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether quantize_activation and w8a8 take x [m, k] of `dtype` and codes [n, k]."""
    return supports_product("W8A8", m, n, k, dtype, DTYPES, 0, 16)


# (rows of x up to, rows of weights, columns) -> the fastest tiling at the shapes of Qwen3-8B, its time with
# quantization and cuBLAS in bfloat16. H200, torch 2.11.0, triton 3.6.0, 2026-11-29.
MEASURED: dict[tuple[int, int, int], Tiling] = {
    (32, 4096, 4096): Tiling(32, 64, splits=4, swap=True),  # 10.6 us, cuBLAS 13.8
    (128, 4096, 4096): Tiling(64, 64, splits=2, stages=6),  # 11.5, 13.4 us, cuBLAS 11.8, 13.7
    (256, 4096, 4096): Tiling(128, 64, splits=2),  # 19.1 us, cuBLAS 18.3
    (512, 4096, 4096): Tiling(128, 128, warps=8, stages=6, ctas=1),  # 24.9 us, cuBLAS 24.3
    (1024, 4096, 4096): Tiling(128, 256, warps=8, ctas=1),  # 43.0 us, cuBLAS 44.7
    (4096, 4096, 4096): Tiling(128, 256, warps=8, group=16, ctas=1),  # 164.8 us, cuBLAS 175.3
    (32, 4096, 12288): Tiling(32, 64, splits=4, swap=True),  # 20.5 us, cuBLAS 29.8
    (64, 4096, 12288): Tiling(64, 64, splits=4, stages=6),  # 22.5 us, cuBLAS 31.9
    (128, 4096, 12288): Tiling(128, 64, splits=4, swap=True),  # 28.9 us, cuBLAS 33.5
    (256, 4096, 12288): Tiling(128, 64, splits=2, pdl=False),  # 39.4 us, cuBLAS 42.6
    (512, 4096, 12288): Tiling(128, 128, warps=8, stages=6, ctas=1, pdl=False),  # 66.6 us, cuBLAS 67.1
    (1024, 4096, 12288): Tiling(128, 256, warps=8, ctas=1),  # 114.8 us, cuBLAS 127.7
    (4096, 4096, 12288): Tiling(128, 256, warps=8, group=16, ctas=1),  # 449.5 us, cuBLAS 507.2
    (32, 6144, 4096): Tiling(32, 64, splits=2, swap=True),  # 12.9 us, cuBLAS 16.2
    (64, 6144, 4096): Tiling(64, 64, splits=2, stages=6),  # 14.4 us, cuBLAS 16.4
    (128, 6144, 4096): Tiling(64, 64, stages=5, swap=True),  # 17.4 us, cuBLAS 16.9
    (256, 6144, 4096): Tiling(64, 64),  # 23.1 us, cuBLAS 22.0
    (1024, 6144, 4096): Tiling(128, 64, stages=3, swap=True),  # 31.7, 60.5 us, cuBLAS 36.1, 68.5
    (4096, 6144, 4096): Tiling(128, 256, warps=8, group=16, ctas=1),  # 233.6 us, cuBLAS 260.3
    (32, 24576, 4096): Tiling(32, 64, swap=True),  # 29.4 us, cuBLAS 50.1
    (64, 24576, 4096): Tiling(64, 64, swap=True),  # 30.3 us, cuBLAS 51.2
    (128, 24576, 4096): Tiling(64, 128, stages=3),  # 34.5 us, cuBLAS 54.3
    (512, 24576, 4096): Tiling(128, 64, stages=3, swap=True),  # 59.5, 113.0 us, cuBLAS 72.4, 134.8
    (1024, 24576, 4096): Tiling(128, 256, warps=8, ctas=1),  # 219.3 us, cuBLAS 264.1
    (4096, 24576, 4096): Tiling(128, 256, warps=8, group=16, ctas=1),  # 948.4 us, cuBLAS 1058.8
}


@cache
def config(m: int, n: int, k: int) -> Tiling:
    """The tiling for x [m, k] and a weight [n, k]: a measured one, or the largest with two CTAs for each of
    an H200's 132 multiprocessors."""
    if found := measured(MEASURED, min(m, 4096), n, k):
        return found

    def splits(tiles: int) -> int:
        """About two CTAs a multiprocessor, each with at least four steps along K."""
        return max(1, min(8, -(-k // 512), 264 // tiles))

    if m <= 64:
        block_m = next(size for size in BLOCKS_M if m <= size)
        return Tiling(block_m, 64, splits=splits(-(-n // 64)), stages=6, swap=True)
    for block_m in (128, 64):
        tiles = -(-m // block_m) * -(-n // 128)
        if tiles >= 264:
            return Tiling(block_m, 128, warps=block_m // 16, stages=3)
    return Tiling(64, 128, splits=splits(tiles), stages=4)
