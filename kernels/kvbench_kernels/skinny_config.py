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

    kind: "vector" = FP32 multiply-adds on weights in registers (M <= 4), "dot" = tensor cores, M padded to 16.
    block_n rows of w by block_k columns are one step of a CTA; splits CTAs share a row of tiles along K.
    stages: 1 = "vector" loads the next step into registers while it works on this one; more = a ring in shared
    memory. swap ("dot" only): the weights are the left operand, so that 64 rows of them can be one wgmma.
    pdl: programmatic dependent launch (compute capability 9.0, ignored elsewhere); the CTAs start while the kernel
    before still runs and wait for it only before they read x. "vector" with stages 1 has its first weights under way
    by then, so no kernel right before it may write the weights.
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
            f"A weight of {n} x {k} has rows that are no whole number of 16-byte loads; K must be a multiple of 8.",
        )
    return Accepted()


# Fastest tiling measured (benchmarks/linear.py) for rows of x up to the first number, rows of weights, columns.
MEASURED: dict[tuple[int, int, int], Tiling] = {}
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


def splits_used(tiling: Tiling, k: int) -> int:
    """Splits along K columns of which none is empty: at most tiling.splits; 5 steps in 4 splits of 2 need only 3."""
    steps = -(-k // tiling.block_k)
    return -(-steps // -(-steps // tiling.splits))
