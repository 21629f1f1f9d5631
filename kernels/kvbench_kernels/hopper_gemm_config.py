"""Which block-scaled FP8 products the Hopper kernel takes, and with which tiles. Pure: no torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench_kernels.support import Accepted, Rejected

BLOCK = 128  # columns of x, and rows and columns of the weight, that share a scale
DTYPES = ("bfloat16", "float16")
SHARED_BYTES = 232_448  # of a CTA, on compute capability 9.0
_SHARED_PER_PROCESSOR = 233_472  # of which each CTA costs 1024 more than it asks for
_MULTIPROCESSORS = 132
_ROWS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))  # groups and parts


@dataclass(frozen=True)
class HopperTiling:
    """How one launch cuts y[M, N] = x[M, K] w[N, K]^T.

    A tile of y has groups * parts * 64 rows and block_n columns. groups: of four warps that multiply, 1 to 3, beside one
    warp that copies. parts: of 64 rows that a group multiplies one after the other. stages: steps of 128 columns in the
    ring. height: rows of tiles that are walked down before the next column of tiles. ctas: at a time on a
    multiprocessor. buffers: for results on their way out, a group. turns: whether the groups
    use the tensor core in turn, and when the turn is passed on, 0 to 3. splits: of K, whose sums the last to come adds up.
    copied: whether the scales of x come through the ring, or are loaded by the groups that multiply.
    """

    groups: int
    parts: int
    block_n: int
    stages: int
    height: int = 8
    ctas: int = 1
    buffers: int = 1
    turns: int = 0
    splits: int = 1
    copied: bool = False

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
        if self.buffers not in (1, 2) or not 0 <= self.turns <= (3 if self.groups > 1 else 0):
            return f"{self.buffers} buffers, turns {self.turns}: it takes 1 or 2 buffers, and turns 0 to 3 of 2 or 3 groups."
        if not 1 <= self.splits <= 8:
            return f"{self.splits} splits of K are no choice; it takes 1 to 8."
        room = min(SHARED_BYTES, _SHARED_PER_PROCESSOR // self.ctas - 1024)
        if self.shared_bytes > room:
            return f"{self.stages} stages take {self.shared_bytes} bytes of shared memory, and {room} exist; use fewer."
        return None


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
MEASURED: dict[tuple[int, int, int], HopperTiling] = {}
_M_MEASURED = (128, 256, 512, 1024, 2048, 4096, 8192)

# From the largest tile to the smallest.
_BY_SIZE = (
    HopperTiling(2, 2, 128, 4, height=4),
    HopperTiling(2, 1, 128, 6, height=16, turns=1),
    HopperTiling(2, 1, 64, 7),
    HopperTiling(1, 1, 64, 11),
)


def config(m: int, n: int, k: int) -> HopperTiling:
    """The tiling for x [m, k] and w [n, k]."""
    bucket = next((top for top in _M_MEASURED if m <= top), _M_MEASURED[-1])
    measured = MEASURED.get((bucket, n, k))
    return measured if measured is not None else _default(m, n)


def _default(m: int, n: int) -> HopperTiling:
    """For shapes that were not measured: the largest tile that fills nine tenths of its waves, else the smallest."""
    for tiling in _BY_SIZE:
        tiles = -(-m // tiling.block_m) * (n // tiling.block_n)
        waves = -(-tiles // _MULTIPROCESSORS)
        if tiles >= 0.9 * waves * _MULTIPROCESSORS:
            return tiling
    return _BY_SIZE[1] if m * n >= _MULTIPROCESSORS * 128 * 128 else _BY_SIZE[-1]
