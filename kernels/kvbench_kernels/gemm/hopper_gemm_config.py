"""Which FP8 products the Hopper kernel takes, and their tilings. Imports no torch and no triton."""

from dataclasses import dataclass, replace

from kvbench_kernels.support import Accepted, Rejected, supports_product

BLOCK = 128  # columns of x, and rows and columns of the weight, that share a scale
DTYPES = ("bfloat16", "float16")
SHARED_BYTES = 232_448  # a CTA, on compute capability 9.0
_SHARED_PER_PROCESSOR = 233_472  # a CTA takes 1024 more than it asks for
_MULTIPROCESSORS = 132
SPLITS_MAX = 8
_STEPS_MIN = 4  # in a part of a shared tile
_ROWS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))  # groups and parts


@dataclass(frozen=True)
class HopperTiling:
    """How one launch divides y[M, N] = x[M, K] w[N, K]^T.

    A tile of y has groups * parts * 64 rows and block_n columns. groups: 1 to 3 groups of four multiplying
    warps, beside one copying warp. parts: blocks of 64 rows that a group multiplies in sequence. stages:
    steps of 128 columns in the ring. height: rows of tiles walked before the next column of tiles. ctas: per
    multiprocessor. buffers: output buffers a group. turns: whether the groups use the tensor core in turn.
    splits: the most CTAs that share a tile of the last wave along K.
    """

    groups: int
    parts: int
    block_n: int
    stages: int
    height: int = 8
    ctas: int = 1
    buffers: int = 1
    turns: bool = False
    splits: int = 1

    @property
    def block_m(self) -> int:
        return self.groups * self.parts * 64

    @property
    def shared_bytes(self) -> int:
        """A CTA's ring, output buffers and barriers."""
        ring = self.stages * ((self.block_m + self.block_n) * BLOCK + self.block_m * 4)
        return ring + self.groups * self.buffers * 64 * self.block_n * 2 + 512

    def problem(self) -> str | None:
        """Why no kernel can be built with this tiling, or None."""
        room = min(SHARED_BYTES, _SHARED_PER_PROCESSOR // max(1, self.ctas) - 1024)
        if (self.groups, self.parts) not in _ROWS or self.block_n not in (64, 128):
            tile = f"{self.groups} groups of {self.parts} parts and {self.block_n} columns"
            return (
                f"{tile} make no tile; use 1 or 2 groups of 1 or 2 parts, or 3 of 1, and 64 or 128 columns."
            )
        if self.stages < 2 or self.height < 1:
            return f"{self.stages} stages and height {self.height} are too few; use at least 2 and 1."
        if not 1 <= self.ctas <= (2 if self.groups == 1 else 1):
            return f"{self.ctas} CTAs of {self.groups} groups exceed a multiprocessor's registers; use 1."
        if self.buffers not in (1, 2):
            return f"{self.buffers} buffers a group are not supported; use 1 or 2."
        if not 1 <= self.splits <= SPLITS_MAX:
            return f"{self.splits} CTAs cannot share a tile; use 1 to {SPLITS_MAX}."
        if self.turns and self.groups == 1:
            return "One group cannot take turns; use 2 or 3, or no turns."
        if self.shared_bytes > room:
            return (
                f"{self.stages} stages take {self.shared_bytes} bytes of shared memory, of {room}; use fewer."
            )
        return None


def waves(tiles: int, programs: int, steps: int, splits: int) -> tuple[int, int, int]:
    """(whole tiles, shared tiles, CTAs that share each) of a launch with `programs` CTAs at a time.

    Whole tiles fill complete waves. Each tile of the rest is shared by at most `splits` CTAs, if that many
    are free and each gets enough steps of 128 columns.
    """
    rest = tiles % programs
    shared = min(splits, programs // rest, steps // _STEPS_MIN) if rest else 1
    return (tiles - rest, rest, shared) if shared > 1 else (tiles, 0, 1)


def supports_hopper_gemm(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether hopper_w8a8 takes x [m, k] and w [n, k] with results of `dtype`."""
    if n < BLOCK or n % BLOCK:
        return Rejected("shape", f"A weight of {n} x {k} does not fit: N must be a multiple of {BLOCK}.")
    return supports_product("Hopper", m, n, k, dtype, DTYPES, 0, BLOCK)


# Rows x columns of a tile of y.
_T64X64 = HopperTiling(1, 1, 64, 8, height=16)
_T64X64_TWICE = HopperTiling(1, 1, 64, 6, height=16, ctas=2)
_T64X128 = HopperTiling(1, 1, 128, 6, height=16)
_T64X128_TWICE = HopperTiling(1, 1, 128, 3, height=16, ctas=2)
_T128X64 = HopperTiling(2, 1, 64, 8, height=16)
_T128X128 = HopperTiling(2, 1, 128, 5, height=16)
_T192X64 = HopperTiling(3, 1, 64, 6, height=11)
_T192X128 = HopperTiling(3, 1, 128, 4, height=11)
_T192X128_TURNS = HopperTiling(3, 1, 128, 4, height=11, turns=True)
_T256X128 = HopperTiling(2, 2, 128, 3, height=4, buffers=2, turns=True)

# [rows, columns of the weight] -> (rows of x up to, the fastest of these tilings, quantization of x included)
# at the shapes of Qwen3-8B. H200, torch 2.11.0, triton 3.6.0, 2026-11-30; docs/notes.md has the sweep.
_ALL = 1 << 62
MEASURED: dict[tuple[int, int], tuple[tuple[int, HopperTiling], ...]] = {
    (4096, 4096): (
        (128, _T64X64), (192, _T64X64_TWICE), (256, _T64X128), (512, _T128X128), (768, _T192X128_TURNS),
        (1024, _T256X128), (1536, _T192X128_TURNS), (2048, _T256X128), (2304, _T192X128), (2560, _T128X128),
        (3584, _T192X128), (4096, _T256X128), (6400, _T192X128), (7168, _T256X128), (_ALL, _T192X128),
    ),
    (6144, 4096): (
        (64, _T64X64), (128, _T64X64_TWICE), (192, _T192X64), (256, _T128X128), (320, _T64X128_TWICE),
        (384, _T192X128_TURNS), (512, _T256X128), (640, _T128X128), (896, _T192X128_TURNS),
        (1024, _T128X128), (1280, _T256X128), (1536, _T192X128), (1664, _T128X128), (2304, _T192X128),
        (2560, _T256X128), (_ALL, _T192X128),
    ),
    (4096, 12288): (
        (64, replace(_T64X64, splits=2)), (128, replace(_T128X64, splits=2)),
        (192, replace(_T192X64, splits=2)), (512, replace(_T128X128, splits=2)), (768, _T192X128_TURNS),
        (1024, _T256X128), (1728, replace(_T192X128, splits=4)), (2048, _T128X128), (2304, _T192X128),
        (2560, _T128X128), (3584, _T192X128), (4096, _T256X128), (6400, replace(_T192X128, splits=4)),
        (_ALL, _T256X128),
    ),
    (24576, 4096): (
        (64, _T64X64), (128, _T128X64), (192, _T192X128_TURNS), (256, _T128X128), (384, _T192X128_TURNS),
        (512, _T256X128), (576, _T192X128_TURNS), (640, _T128X128), (768, _T192X128), (1024, _T256X128),
        (1344, _T192X128), (1536, _T128X128), (2304, _T192X128), (2560, _T256X128), (_ALL, _T192X128),
    ),
}  # fmt: skip


def config(m: int, n: int, k: int) -> HopperTiling:
    """The tiling for x [m, k] and w [n, k]."""
    ranges = MEASURED.get((n, k))
    return next(tiling for rows, tiling in ranges if m <= rows) if ranges else _default(m, n, k)


_BY_SIZE = (_T64X64, _T64X128, _T128X64, _T192X64, _T128X128, _T192X128, _T256X128)


def _default(m: int, n: int, k: int) -> HopperTiling:
    """The tiling of a shape that was not measured: least work for the busiest multiprocessor of an H200."""

    def work(tiling: HopperTiling) -> int:
        """The products of a tile and its operands, weighted to fit the sweep: over its 200 cells from 33 rows
        on the choice is 2 % slower than the fastest tiling on average and 17 % at worst."""
        tiles = -(-m // tiling.block_m) * (n // tiling.block_n)
        area = tiling.block_m * tiling.block_n + 64 * (tiling.block_m + tiling.block_n)
        return -(-tiles // _MULTIPROCESSORS) * area

    # Sharing a tile was faster with 96 steps and not with 32.
    return replace(min(_BY_SIZE, key=work), splits=2 if k >= 8192 else 1)
