"""Which products of FP8 operands torch's block-scaled product takes. Pure: no torch, no triton."""

from __future__ import annotations

from kvbench_kernels.support import Accepted, Rejected

BLOCK, BLOCKS = 128, 4


def supports_scaled_mm(m: int, n: int, k: int, dtype: str) -> Accepted | Rejected:
    """Whether `scaled_mm` takes x [m, k] and codes [n, k] with results of `dtype` ("bfloat16")."""
    if dtype != "bfloat16":
        return Rejected("dtype", f"Results of {dtype} have no block-scaled torch product; it gives bfloat16.")
    if m < 1 or n < BLOCK or n % BLOCK or k < BLOCKS * BLOCK or k % (BLOCKS * BLOCK):
        return Rejected(
            "shape",
            f"{m} rows by a weight of {n} x {k}: torch takes 1 row or more, N of whole blocks of {BLOCK} and K of "
            f"{BLOCKS} of them, or it wants the scales padded.",
        )
    return Accepted()
