"""Which FP8 products of 17 to 128 rows the Hopper kernel takes, and with which tiles. Pure: no torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvbench_kernels.support import Accepted, Rejected

BLOCK = 128  # columns of x, and rows and columns of the weight, that share a scale
DTYPES = ("bfloat16", "float16")
M_MAX = 128
SHARED_BYTES = 232_448  # of a CTA, on compute capability 9.0
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class RowsTiling:
    """How one launch cuts y[M, N] = x[M, K] w[N, K]^T.

    A tile is groups * parts * 64 rows of w and all of x's, padded to `tokens`. groups: of four warps that multiply, 1 or
    2, beside one warp that copies. turns: two groups take steps of the same parts * 64 rows in turn instead of dividing
    the rows. parts: of 64 rows that a group multiplies one after the other. stages: steps of 128
    columns in the ring. programs: CTAs that share all steps of all tiles evenly, 0 for one a tile. early: the first
    weights are read before the kernel in front has ended, which must not be the one that writes them.
    """

    groups: int
    parts: int
    tokens: int
    stages: int
    programs: int = 0
    early: bool = True
    turns: bool = False

    @property
    def rows(self) -> int:
        """Of w, in a tile."""
        return self.across * self.parts * 64

    @property
    def across(self) -> int:
        """Groups that divide a tile's rows."""
        return 1 if self.turns else self.groups

    @property
    def shared_bytes(self) -> int:
        """Of a CTA: the ring, the buffers for results, barriers."""
        step = (self.rows + self.tokens) * BLOCK + self.tokens * 4
        exchange = self.parts * 64 * self.tokens * 4 if self.turns else 0
        return self.stages * (step + 16) + self.across * self.tokens * 64 * 2 + exchange + 512

    def problem(self, m: int = 1) -> str | None:
        """Why no kernel can be built with these numbers, or takes m rows of x, or None."""
        if self.groups not in (1, 2) or self.parts not in (1, 2) or self.tokens not in (32, 64, 128):
            return (
                f"{self.groups} groups of {self.parts} parts and {self.tokens} tokens make no tile; "
                "it takes 1 or 2 groups, 1 or 2 parts and 32, 64 or 128 tokens."
            )
        if self.turns and self.groups != 2:
            return f"turns of {self.groups} groups; it takes turns of 2."
        if self.tokens < m:
            return f"{m} rows of x exceed the tile's {self.tokens}; use the next larger tile."
        if self.stages < 2 or self.programs < 0:
            return f"{self.stages} stages and {self.programs} programs: it takes 2 stages or more and 0 programs or more."
        if self.shared_bytes > SHARED_BYTES:
            return (
                f"{self.stages} stages take {self.shared_bytes} bytes of shared memory, and {SHARED_BYTES} exist; "
                "use fewer."
            )
        return None


def supports_hopper_rows(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether hopper_rows takes x [m, k] and w [n, k] with results of `dtype` ("bfloat16", "float16")."""
    if dtype not in DTYPES:
        return Rejected(
            "dtype", f"Results of {dtype} have no Hopper product of few rows; it gives {', '.join(DTYPES)}."
        )
    if not 1 <= m <= M_MAX:
        return Rejected("rows", f"{m} rows of x; it takes 1 to {M_MAX}. Use hopper_w8a8 for more.")
    if n < BLOCK or n % BLOCK or k < BLOCK or k % BLOCK:
        return Rejected(
            "shape",
            f"A weight of {n} x {k} is no whole number of 128 x 128 blocks, which the Hopper product takes.",
        )
    return Accepted()


# Fastest tiling measured, quantization included, for rows of x up to the first number, rows of weights, columns; those
# of Qwen3-8B.
MEASURED: dict[tuple[int, int, int], RowsTiling] = {}
_M_MEASURED = (32, 64, 128)


def config(m: int, n: int, k: int) -> RowsTiling:
    """The tiling for x [m, k] and w [n, k]."""
    bucket = next((top for top in _M_MEASURED if m <= top), M_MAX)
    measured = MEASURED.get((bucket, n, k))
    if measured is not None:
        return measured
    tokens = bucket
    stages = {32: 10, 64: 8, 128: 5}[tokens]
    tiles, steps = n // 128, k // BLOCK
    # A program a multiprocessor, and four steps or more a program: fewer do not pay for adding up.
    programs = max(tiles if tiles <= _MULTIPROCESSORS else 0, min(_MULTIPROCESSORS, tiles * steps // 4), 1)
    return RowsTiling(2, 1, tokens, stages, programs)


@lru_cache(maxsize=4096)
def pieces(tiles: int, steps: int, programs: int) -> int:
    """Programs that share a tile, at most, when each takes an equal run of tiles * steps units."""
    units = tiles * steps

    def owner(unit: int) -> int:
        return ((unit + 1) * programs - 1) // units

    return max(owner(tile * steps + steps - 1) - owner(tile * steps) + 1 for tile in range(tiles))
