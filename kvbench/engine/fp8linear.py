"""A linear layer whose weight is FP8 E4M3FN with one scale a 128x128 block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kvbench_kernels.blockwise import fp8_dequantize_matmul_torch, quantize_blocks, scale_shape


class Fp8Linear(nn.Module):
    """y = x @ dequantized(weight).T + bias.

    weight: [N, K] float8_e4m3fn. weight_scale_inv: [ceil(N/128), ceil(K/128)] as stored (float32, bfloat16 or float16);
    it multiplies, whatever its name says. bias: [N] or None.
    """

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        if tuple(scales.shape) != scale_shape(*codes.shape):
            raise ValueError(
                f"Codes {list(codes.shape)} need scales {list(scale_shape(*codes.shape))}, not {list(scales.shape)}."
            )
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        held = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", held)

    @classmethod
    def quantized(cls, linear: nn.Linear) -> Fp8Linear:
        """The same layer with its weight quantized; the bias is shared."""
        codes, scales = quantize_blocks(linear.weight.detach())
        return cls(codes, scales, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = fp8_dequantize_matmul_torch(
            x.reshape(-1, self.in_features), self.weight, self.weight_scale_inv, self.bias
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to(device)` moves everything; `.to(dtype)` must not touch codes and scales: cast, they are other numbers."""
        stored = {name: getattr(self, name).data for name in ("weight", "weight_scale_inv")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, data in stored.items():
            now = getattr(self, name)
            if now.dtype != data.dtype:
                now.data = data.to(now.device)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
