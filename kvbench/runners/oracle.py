"""The oracle of the parity runner: what a format must give back, and plain attention over it, in float64.

It shares nothing with the store and the attention backends but the reference quantizer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.formats import KVFormat
from kvbench_kernels.quantize import QUANTIZE


def dequantized(fmt: KVFormat, x: Tensor, scale: float | None) -> Tensor:
    """The float64 values that `x [..., D]` must come back as. scale: the given one of a static format."""
    given = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=x.device)
    quantized = QUANTIZE[fmt.name](x, given)
    values = quantized.codes.double()
    if quantized.scales is not None:
        return values * quantized.scales.double()[..., None]
    return values if given is None else values * given.double()


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """q [Hq, D], k [L, H, D], v [L, H, Dv] in float64 -> [Hq, Dv]. Query head h reads KV head h // (Hq / H)."""
    groups = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    weights = (torch.einsum("hd,lhd->hl", q, k) * scaling).softmax(dim=-1)
    return torch.einsum("hl,lhd->hd", weights, v)


def error_beside_outlier(fmt: KVFormat, scale: float | None, seed: int) -> dict[str, float]:
    """Relative RMSE of 127 N(0, 1) channels beside one that is 1, 30 or 100 times as large, by that factor.

    With one scale a row an outlier takes the resolution of INT8 from all others and not that of E4M3, so the ranking
    of the two turns: 0.65% against 2.6% without an outlier, 22.6% against 2.65% at 100.
    """
    found = {}
    for factor in (1, 30, 100):
        x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(seed))
        x[:, 0] *= factor
        error = (dequantized(fmt, x, scale) - x.double())[:, 1:]
        found[f"x{factor}"] = (error.square().mean() / x[:, 1:].double().square().mean()).sqrt().item()
    return found


def element_error(fmt: KVFormat, x: Tensor, scale: float | None, values: Tensor) -> tuple[float, float]:
    """Worst |x - values| as a share of the format's bound, and as such. Clipped elements have no bound.

    int8: half a step of the stored scale + 1e-6. e4m3: a 16th of the element, or half the smallest step, + 1e-6.
    """
    x = x.double()
    error = (x - values).abs()
    worst = error.max().item()
    if fmt.qmax is None:
        return (0.0 if worst == 0 else float("inf")), worst
    if scale is not None:
        step = torch.full_like(x[..., :1], scale)
    else:
        step = x.abs().amax(-1, keepdim=True) / fmt.qmax
        if fmt.scale_dtype == "float16":
            step = step * (1 + 2.0**-10) + 2.0**-24  # rounded up to FP16
    half = step / 2 if fmt.payload_dtype == "int8" else torch.maximum(x.abs() / 16, step * 2.0**-10)
    inside = x.abs() <= step * fmt.qmax * (1 + 1e-6)
    return torch.where(inside, error / (half + 1e-6), 0.0).max().item(), worst
