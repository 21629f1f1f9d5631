"""The oracle of the parity runner: what a format must give back, and plain attention over it, in float64.

It shares nothing with the store and the attention backends but the reference quantizer and the bounds of formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.probes import element_error as element_error
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
