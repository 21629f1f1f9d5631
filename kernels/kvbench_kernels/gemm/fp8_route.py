"""Which path computes an FP8 linear layer, by (M, N, K). Imports no torch and no triton.

    reference   dequantize the weight, some rows at a time, and multiply in x's dtype
    w8a16       the weight stays FP8 and is widened in registers; x stays as it is
    w8a8        x is quantized too, one scale a row and 128 columns; FP8 tensor cores
    hopper      as w8a8, by the kernel for compute capability 9.0

Relative errors of W8A16 and W8A8 against the dequantized weight are about 1.7e-3 and 2.6e-2 in bfloat16
(H200, docs/results.md)."""

from collections.abc import Callable
from typing import Literal

from kvbench_kernels.gemm.hopper_gemm_config import supports_hopper_gemm
from kvbench_kernels.gemm.w8a8_config import supports_w8a8
from kvbench_kernels.gemm.w8a16_config import supports_w8a16
from kvbench_kernels.support import Accepted, Rejected

Path = Literal["reference", "w8a16", "w8a8", "hopper"]
# torch alone (a CPU, or a GPU without E4M3), Triton's interpreter, a GPU of compute capability 8.9 and more,
# one of 9.0.
Target = Literal["torch", "interpreter", "cuda", "hopper"]

# The paths that quantize x; gemm "w8a8" asks for one of them.
W8A8: frozenset[Path] = frozenset({"w8a8", "hopper"})

# Beginnings of the names of multiplying kernels.
_KERNELS: dict[str, Path] = {
    "fp8_dequantize_matmul": "reference",
    "w8a16": "w8a16",
    "fp8_matmul_w8a8": "w8a8",
    "hopper_w8a8": "hopper",
}

_SUPPORTS: dict[Path, Callable[[int, int, int, str], Accepted | Rejected]] = {
    "w8a16": supports_w8a16,
    "w8a8": supports_w8a8,
    "hopper": supports_hopper_gemm,
}

# (N, K) -> (rows of x up to, fastest path, quantization included).
# H200, torch 2.11.0, triton 3.6.0, 2026-11-30, bfloat16; docs/notes.md has the sweep.
Ranges = tuple[tuple[int, Path], ...]
_ALL = 1 << 62
MEASURED: dict[tuple[int, int], Ranges] = {
    (6144, 4096): ((16, "w8a16"), (_ALL, "hopper")),
    (4096, 4096): ((16, "w8a16"), (64, "w8a8"), (_ALL, "hopper")),
    (24576, 4096): ((16, "w8a16"), (128, "w8a8"), (_ALL, "hopper")),
    (4096, 12288): ((16, "w8a16"), (32, "w8a8"), (_ALL, "hopper")),
}
_DEFAULT: Ranges = ((16, "w8a16"), (64, "w8a8"), (_ALL, "hopper"))  # of shapes that were not measured
_PORTABLE: Ranges = ((32, "w8a16"), (_ALL, "w8a8"))  # where there is no Hopper GPU


def route(m: int, n: int, k: int, dtype: str, target: Target, gemm: str = "auto") -> Path:
    """The path of x [m, k] times a weight [n, k]. dtype: of x; gemm: one of `support.GEMMS`.

    If the requested path does not take the product, or for "auto" in float32, the path is `reference`. "w8a8"
    is the fastest path that quantizes x.
    """
    if target == "torch" or gemm == "reference" or (gemm == "auto" and dtype == "float32"):
        return "reference"
    ranges = MEASURED.get((n, k), _DEFAULT) if target == "hopper" else _PORTABLE
    fastest = next(path for rows, path in ranges if m <= rows)
    wanted: list[Path] = [fastest, "w8a8", "w8a16"]
    if gemm == "w8a16":
        wanted = ["w8a16"]
    elif gemm == "w8a8":
        wanted = [path for path in wanted if path in W8A8]
    return next(
        (path for path in wanted if isinstance(_SUPPORTS[path](m, n, k, dtype), Accepted)), "reference"
    )


def path_of_kernel(name: str) -> Path | None:
    """The path of a multiplying kernel by its name; None for any other kernel."""
    return next((path for start, path in _KERNELS.items() if name.startswith(start)), None)
