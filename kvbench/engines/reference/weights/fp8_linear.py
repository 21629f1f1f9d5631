"""FP8 linear layers: codes and block scales as stored, products by `kvbench_kernels.gemm.fp8_linear`.

The product is a custom op, opaque to torch.compile. Siblings that read the same input (q, k, v; gate, up) lie
in one tensor where their rows are whole blocks: the first computes the product, the others take their
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvbench.engines.reference.weights.linear import SHARED_INPUT
from kvbench.errors import KvbenchError
from kvbench_kernels.gemm.blockwise import BLOCK, quantize_blocks, scale_shape
from kvbench_kernels.gemm.fp8_linear import fp8_linear

_gemm = "reference"  # of a model that is called outside of an engine


@contextmanager
def using(gemm: str) -> Iterator[None]:
    """Products inside the `with` take this path, one of `kvbench_kernels.support.GEMMS`."""
    global _gemm
    kept, _gemm = _gemm, gemm
    try:
        yield
    finally:
        _gemm = kept


@torch.library.custom_op("kvbench::fp8_linear", mutates_args=())
def fp8_linear_op(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], codes [N, K], scales [ceil(N/128), ceil(K/128)], bias [N] or None -> [..., N]."""
    y = fp8_linear(x.reshape(-1, x.shape[-1]), codes, scales, bias, _gemm)
    return y.view(*x.shape[:-1], codes.shape[0])


@fp8_linear_op.register_fake
def _fp8_linear_fake(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


class Fp8Linear(nn.Module):
    """A linear layer whose weight is FP8 with one scale a 128x128 block.

    weight: [N, K] float8_e4m3fn; weight_scale_inv: [ceil(N/128), ceil(K/128)] in its stored dtype, a
    multiplier despite its name (that of checkpoints); bias: [N] or None. group: the modules whose product
    this one's call computes, itself first, on the first of them only."""

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter
    bias: nn.Parameter | None
    group: tuple[Fp8Linear, ...]
    _joined: tuple[Tensor, Tensor, Tensor | None] | None
    _ahead: tuple[Tensor, Tensor] | None

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        expected = scale_shape(*codes.shape)
        if tuple(scales.shape) != expected:
            shapes = [list(shape) for shape in (codes.shape, expected, scales.shape)]
            raise ValueError("Codes {} need scales {}, not {}.".format(*shapes))
        self.out_features, self.in_features = codes.shape
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        held = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", held)
        self.group, self._joined, self._ahead = (), None, None

    @classmethod
    def quantized(cls, linear: nn.Linear) -> Fp8Linear:
        """The same layer with its weight quantized; the bias is shared."""
        return cls(*quantize_blocks(linear.weight.detach()), linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        if self._joined is None:
            return cast(Tensor, fp8_linear_op(x, self.weight, self.weight_scale_inv, self.bias))
        y = fp8_linear_op(x, *self._joined)
        first, *others = torch.split(y, [m.out_features for m in self.group], dim=-1)
        for module, out in zip(self.group[1:], others, strict=True):
            module._ahead = (x, out)
        return first

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to(device)` moves everything; `.to(dtype)` must not cast codes and scales."""
        if self._joined is not None:
            raise KvbenchError(
                "FP8 layers that are one product cannot be moved or cast; do that before join_siblings."
            )
        stored = {name: getattr(self, name).data for name in ("weight", "weight_scale_inv")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, data in stored.items():
            now = getattr(self, name)
            if now.dtype != data.dtype:
                now.data = data.to(now.device)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


def join_siblings(model: nn.Module) -> int:
    """Makes siblings that share their input one product, where each has whole blocks of rows; returns how
    many groups. Codes, scales and biases move into one tensor each, of which the modules keep views."""
    groups = ([getattr(m, name, None) for name in names] for m in model.modules() for names in SHARED_INPUT)
    return sum(_join(group) for group in groups)


def _join(siblings: list[object]) -> bool:
    group = [m for m in siblings if isinstance(m, Fp8Linear)]
    if len(group) < len(siblings) or any(m.out_features % BLOCK for m in group):
        return False
    if len({(m.in_features, m.weight_scale_inv.dtype, m.bias is None) for m in group}) > 1:
        return False
    codes = torch.cat([m.weight.data.view(torch.uint8) for m in group]).view(torch.float8_e4m3fn)
    scales = torch.cat([m.weight_scale_inv.data for m in group])
    bias = None if group[0].bias is None else torch.cat([m.bias.data for m in group if m.bias is not None])
    row = 0
    for m in group:
        end = row + m.out_features
        m.weight.data = codes[row:end]
        m.weight_scale_inv.data = scales[row // BLOCK : end // BLOCK]
        if m.bias is not None and bias is not None:
            m.bias.data = bias[row:end]
        row = end
    group[0].group, group[0]._joined = tuple(group), (codes, scales, bias)
    return True
