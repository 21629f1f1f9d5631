"""Which path computes an FP8 linear layer, by (M, N, K). Pure: no torch, no triton.

    reference   dequantize the weight, a strip of rows at a time, and multiply in x's dtype
    w8a16       the weight stays FP8 and is widened in registers; x stays as it is
    w8a8        x is quantized too, one scale a row and 128 columns; FP8 tensor cores
    hopper      as w8a8, by the kernel for compute capability 9.0

W8A16 and W8A8 are other numbers: relative errors against the dequantized weight are about 4e-3 and 3e-2 in bfloat16.
"""

from __future__ import annotations

from typing import Literal

from kvbench_kernels.support import Accepted
from kvbench_kernels.w8a16_config import supports_w8a16
from kvbench_kernels.w8a8_config import supports_w8a8

Path = Literal["reference", "w8a16", "w8a8", "hopper"]
# Where a product runs: torch alone (a CPU, or a GPU without E4M3), Triton's interpreter, a CUDA device from compute
# capability 8.9 on, one of 9.0.
Target = Literal["torch", "interpreter", "cuda", "hopper"]

# What the names of the kernels begin with that multiply, by path.
_KERNELS: dict[str, Path] = {
    "fp8_dequantize_matmul": "reference",
    "w8a16": "w8a16",
    "w8a8": "w8a8",
    "fp8_matmul_w8a8": "w8a8",
    "hopper_w8a8": "hopper",
}

# Most rows of x for which w8a16 was the fastest, by (N, K).
W8A16_MAX: dict[tuple[int, int], int] = {}


def route(m: int, n: int, k: int, dtype: str, target: Target, gemm: str = "auto") -> Path:
    """The path of x [m, k] times a weight [n, k]. dtype: of x; gemm: one of `support.GEMMS`.

    A path that was asked for and does not take the product leaves it to `reference`; so does "auto" in float32, which
    is for comparison and not for speed.
    """
    if target == "torch" or gemm == "reference" or (gemm == "auto" and dtype == "float32"):
        return "reference"
    few = isinstance(supports_w8a16(m, n, k, dtype), Accepted)
    if gemm == "w8a16" or (gemm == "auto" and few and m <= W8A16_MAX.get((n, k), 32)):
        return "w8a16" if few else "reference"
    if not isinstance(supports_w8a8(m, n, k, dtype), Accepted):
        return "reference"
    return "w8a8"


def path_of_kernel(name: str) -> Path | None:
    """The path that a multiplying kernel belongs to, by its name; None for a stranger's."""
    return next((path for start, path in _KERNELS.items() if name.startswith(start)), None)
