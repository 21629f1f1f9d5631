"""Which block-scaled FP8 products the Hopper kernel takes, and with which tiles. Pure: no torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench_kernels.support import Accepted, Rejected

BLOCK = 128  # columns of x, and rows and columns of the weight, that share a scale
DTYPES = ("bfloat16", "float16")
SHARED_BYTES = 232_448  # of a CTA, on compute capability 9.0
_SHARED_PER_PROCESSOR = 233_472  # of which each CTA costs 1024 more than it asks for
_MULTIPROCESSORS = 132
SPLITS_MAX = 8
_STEPS_MIN = 4  # that a part of a tile is worth
_ROWS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))  # groups and parts


@dataclass(frozen=True)
class HopperTiling:
    """How one launch cuts y[M, N] = x[M, K] w[N, K]^T.

    A tile of y has groups * parts * 64 rows and block_n columns. groups: of four warps that multiply, 1 to 3, beside one
    warp that copies. parts: of 64 rows that a group multiplies one after the other. stages: steps of 128 columns in the
    ring. height: rows of tiles that are walked down before the next column of tiles. ctas: at a time on a
    multiprocessor. buffers: for results on their way out, a group. turns: whether the groups use the tensor core in turn.
    copied: whether the scales of x come through the ring, or are loaded by the groups that multiply. splits: CTAs that
    may share a tile of the last wave along K.
    """

    groups: int
    parts: int
    block_n: int
    stages: int
    height: int = 8
    ctas: int = 1
    buffers: int = 1
    turns: bool = False
    copied: bool = False
    splits: int = 1

    @property
    def block_m(self) -> int:
        return self.groups * self.parts * 64

    @property
    def shared_bytes(self) -> int:
        """Of a CTA: the ring, the buffers for results, barriers."""
        ring = self.stages * ((self.block_m + self.block_n) * BLOCK + self.block_m * 4 * self.copied)
        return ring + self.groups * self.buffers * 64 * self.block_n * 2 + 512

    def problem(self) -> str | None:
        """Why no kernel can be built with these numbers, or None."""
        if (self.groups, self.parts) not in _ROWS or self.block_n not in (64, 128):
            return (
                f"{self.groups} groups of {self.parts} parts and {self.block_n} columns make no tile; "
                "it takes 1 or 2 groups of 1 or 2 parts, or 3 of 1, and 64 or 128 columns."
            )
        if self.stages < 2 or self.height < 1:
            return f"{self.stages} stages and height {self.height} are too few; it takes 2 stages and height 1 or more."
        if not 1 <= self.ctas <= (2 if self.groups == 1 else 1):
            return f"{self.ctas} CTAs of {self.groups} groups exceed a multiprocessor's registers; use 1."
        if self.buffers not in (1, 2):
            return f"{self.buffers} buffers of a group are no choice; it takes 1 or 2."
        if not 1 <= self.splits <= SPLITS_MAX:
            return f"{self.splits} CTAs cannot share a tile; it takes 1 to {SPLITS_MAX}."
        if self.turns and self.groups == 1:
            return "One group has none to take turns with; use 2 or 3, or no turns."
        room = min(SHARED_BYTES, _SHARED_PER_PROCESSOR // self.ctas - 1024)
        if self.shared_bytes > room:
            return f"{self.stages} stages take {self.shared_bytes} bytes of shared memory, and {room} exist; use fewer."
        return None


def waves(tiles: int, programs: int, steps: int, splits: int) -> tuple[int, int, int]:
    """(whole tiles, tiles that are shared, CTAs that share each) of a launch that `programs` CTAs can work on at a time.

    The whole ones fill waves; what is left is shared by at most `splits` CTAs a tile, where that many are free and each
    has steps of 128 columns enough.
    """
    rest = tiles % programs
    shared = min(splits, programs // rest, steps // _STEPS_MIN) if rest else 1
    return (tiles - rest, rest, shared) if shared > 1 else (tiles, 0, 1)


def supports_hopper_gemm(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether hopper_w8a8 takes x [m, k] and w [n, k] with results of `dtype` ("bfloat16", "float16")."""
    if dtype not in DTYPES:
        return Rejected("dtype", f"Results of {dtype} have no Hopper product; it gives {', '.join(DTYPES)}.")
    if m < 1:
        return Rejected("rows", f"{m} rows of x are no product; it takes 1 or more.")
    if n < BLOCK or n % BLOCK or k < BLOCK or k % BLOCK:
        return Rejected(
            "shape",
            f"A weight of {n} x {k} is no whole number of 128 x 128 blocks, which the Hopper product takes.",
        )
    return Accepted()


# Fastest tiling measured for rows of x up to the first number, rows of weights, columns; those of Qwen3-8B.
# H200, torch 2.11.0, triton 3.6.0, 2026-11-29; times of the run, of the product alone, cuBLAS in bfloat16 beside.
# fmt: off
MEASURED: dict[tuple[int, int, int], HopperTiling] = {
    (128, 4096, 4096): HopperTiling(1, 1, 64, 6, height=16, ctas=2),  # 11.8 us, 364 TFLOP/s; cuBLAS 13.8
    (256, 4096, 4096): HopperTiling(1, 1, 128, 4, height=16, ctas=2),  # 13.9 us, 618 TFLOP/s; cuBLAS 16.7
    (512, 4096, 4096): HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),  # 17.5 us, 983 TFLOP/s; cuBLAS 24.3
    (1024, 4096, 4096): HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),  # 30.8 us, 1117 TFLOP/s; cuBLAS 46.8
    (4096, 4096, 4096): HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),  # 121.6 us, 1130 TFLOP/s; cuBLAS 187.7
    (8192, 4096, 4096): HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),  # 242.2 us, 1135 TFLOP/s; cuBLAS 380.2
    (128, 4096, 12288): HopperTiling(1, 1, 128, 3, height=16, ctas=2, copied=True),  # 37.3 us, 346 TFLOP/s; cuBLAS 33.4
    (256, 4096, 12288): HopperTiling(1, 1, 128, 3, height=16, ctas=2, copied=True),  # 38.5 us, 670 TFLOP/s; cuBLAS 42.7
    (512, 4096, 12288): HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),  # 46.6 us, 1105 TFLOP/s; cuBLAS 68.3
    (1024, 4096, 12288): HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),  # 84.7 us, 1218 TFLOP/s; cuBLAS 132.0
    (4096, 4096, 12288): HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),  # 347.8 us, 1185 TFLOP/s; cuBLAS 549.0
    (8192, 4096, 12288): HopperTiling(3, 1, 128, 4, height=11, turns=True, copied=True),  # 686.7 us, 1201 TFLOP/s; cuBLAS 1100.1
    (128, 6144, 4096): HopperTiling(1, 1, 64, 6, height=16, ctas=2),  # 14.0 us, 459 TFLOP/s; cuBLAS 16.5
    (256, 6144, 4096): HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),  # 17.4 us, 739 TFLOP/s; cuBLAS 22.5
    (512, 6144, 4096): HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),  # 29.2 us, 881 TFLOP/s; cuBLAS 35.8
    (1024, 6144, 4096): HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),  # 45.5 us, 1134 TFLOP/s; cuBLAS 69.4
    (4096, 6144, 4096): HopperTiling(3, 1, 128, 4, height=11, turns=True, copied=True),  # 177.1 us, 1164 TFLOP/s; cuBLAS 288.1
    (8192, 6144, 4096): HopperTiling(3, 1, 128, 4, height=11),  # 349.6 us, 1179 TFLOP/s; cuBLAS 573.9
    (128, 24576, 4096): HopperTiling(1, 1, 128, 3, height=16, ctas=2, copied=True),  # 37.4 us, 689 TFLOP/s; cuBLAS 55.0
    (256, 24576, 4096): HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),  # 51.0 us, 1010 TFLOP/s; cuBLAS 73.6
    (512, 24576, 4096): HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),  # 92.1 us, 1120 TFLOP/s; cuBLAS 135.3
    (1024, 24576, 4096): HopperTiling(2, 2, 128, 4, height=4),  # 189.5 us, 1088 TFLOP/s; cuBLAS 290.1
    (4096, 24576, 4096): HopperTiling(3, 1, 128, 4, height=11),  # 703.6 us, 1172 TFLOP/s; cuBLAS 1155.0
    (8192, 24576, 4096): HopperTiling(3, 1, 128, 4, height=11),  # 1371.2 us, 1203 TFLOP/s; cuBLAS 2319.8
}
# fmt: on
_M_MEASURED = (128, 256, 512, 1024, 4096, 8192)

# For shapes that were not measured, tilings that were.
_BY_SIZE = (
    HopperTiling(2, 2, 128, 3, height=4, buffers=2, copied=True),
    HopperTiling(2, 1, 128, 5, height=16, turns=True, copied=True),
    HopperTiling(1, 1, 128, 3, height=16, ctas=2, copied=True),
    HopperTiling(1, 1, 64, 6, height=16, ctas=2),
)


def config(m: int, n: int, k: int) -> HopperTiling:
    """The tiling for x [m, k] and w [n, k]."""
    bucket = next((top for top in _M_MEASURED if m <= top), _M_MEASURED[-1])
    measured = MEASURED.get((bucket, n, k))
    return measured if measured is not None else _default(m, n)


def _default(m: int, n: int) -> HopperTiling:
    """For shapes that were not measured: the tiling that gives the busiest multiprocessor of an H200 the least work."""

    def work(tiling: HopperTiling) -> int:
        tiles = -(-m // tiling.block_m) * (n // tiling.block_n)
        # The products of a tile and, at a price that fits, its operands: the choice is 2 % slower than the table's on
        # the average of its shapes, and 16 % at the worst.
        size = tiling.block_m * tiling.block_n + 64 * (tiling.block_m + tiling.block_n)
        return -(-tiles // _MULTIPROCESSORS) * size

    return min(_BY_SIZE, key=work)
