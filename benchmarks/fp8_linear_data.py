"""The layers of the FP8 linear benchmark: random weights with block scales, and what a product of them must
come to.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvbench_kernels.gemm.blockwise import (
    dequantize_activation,
    dequantize_blocks,
    quantize_activation_torch,
    quantize_blocks,
)

# Rows and columns of the weights of Qwen3-8B, and of one to try the script on anything.
SHAPES: dict[str, tuple[int, int]] = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "tiny": (256, 256),
}
COLD_BYTES = 240_000_000  # of FP8 codes that one graph reads: four times the L2 of 60 MB

# Largest relative error (of norms) that counts as right, against the dequantized weight and, where
# activations are quantized, against the quantized operands. No element may be further off than PEAK times
# that share of the root of the mean square: rounding to bfloat16 alone takes six of these for an element of
# six standard deviations.
BOUNDS = {"native": 6e-3, "w8a16": 6e-3, "w8a8": 4e-2}
PRODUCT_BOUND = 4e-3
PEAK = 10


class Weights:
    """Random weights [n, k], enough for COLD_BYTES of codes. dense: the values of the codes, in `dtype`."""

    def __init__(
        self, n: int, k: int, device: torch.device, dtype: torch.dtype, cold: int = COLD_BYTES
    ) -> None:
        self.n, self.k, self.device, self.dtype = n, k, device, dtype
        self.sets = max(2, -(-cold // (n * k))) if cold else 1
        made = [
            quantize_blocks(torch.randn(n, k, device=device, dtype=dtype) * k**-0.5) for _ in range(self.sets)
        ]
        self.codes = [codes for codes, _ in made]
        self.scales = [scales for _, scales in made]

    @cached_property
    def dense(self) -> list[Tensor]:
        return [self.exact(s).to(self.dtype) for s in range(self.sets)]

    def exact(self, s: int) -> Tensor:
        """Weight s [n, k] float32, as its codes and scales stand for it."""
        return dequantize_blocks(self.codes[s], self.scales[s])


class Case:
    """Weights and one x [m, k]: the products in float32, with x as it is and with x quantized."""

    def __init__(self, weights: Weights, m: int) -> None:
        self.weights, self.m = weights, m
        self.x = torch.randn(m, weights.k, device=weights.device, dtype=weights.dtype)

    @cached_property
    def due(self) -> list[Tensor]:
        return [self._product(self.x.float(), s) for s in range(self.weights.sets)]

    @cached_property
    def due_quantized(self) -> list[Tensor]:
        """Of the quantized operands, as the torch reference quantizes."""
        x = dequantize_activation(*quantize_activation_torch(self.x))
        return [self._product(x, s) for s in range(self.weights.sets)]

    def _product(self, x: Tensor, s: int) -> Tensor:
        assert torch.get_float32_matmul_precision() == "highest"
        return x @ self.weights.exact(s).t()


def distance(found: list[Tensor], due: list[Tensor]) -> tuple[float, float]:
    """(relative error of the norm, largest error over the root mean square) of the worst tensor; NaN stays
    NaN.
    """
    rows = []
    for got, exact in zip(found, due, strict=True):
        off = got.float() - exact
        norm = exact.norm()
        rows.append(torch.stack((off.norm() / norm, off.abs().max() * exact.numel() ** 0.5 / norm)))
    worst = torch.stack(rows).amax(0)  # NaN where any is
    return float(worst[0]), float(worst[1])


def fault_of(error: tuple[float, float], bound: float) -> str:
    """Empty when the error is within the bound."""
    relative, peak = error
    if not relative <= bound:
        return f"relative error {relative:.2e}, at most {bound:.0e} is due"
    if not peak <= PEAK * bound:
        return f"an element is off by {peak:.2e} of the root mean square, at most {PEAK * bound:.0e} is due"
    return ""
