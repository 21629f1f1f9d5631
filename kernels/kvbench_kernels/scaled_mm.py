"""FP8 activations times FP8 weights, both with block scales, by torch's own product (cuBLAS and CUTLASS on Hopper GPUs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from kvbench_kernels.blockwise import empty_activation_scales
from kvbench_kernels.launches import launched

ROWS = 4  # the product takes multiples of so many rows


def scaled_mm(
    codes_x: Tensor, scales_x: Tensor, codes_w: Tensor, scales_w: Tensor, bias: Tensor | None
) -> Tensor:
    """codes_x [M, K] with scales_x [M, K/128], codes_w [N, K] with scales_w [N/128, K/128] -> [M, N] bfloat16.

    Scales of x as `blockwise.empty_activation_scales` makes them; those of w in float32, or another dtype, which is widened
    first. M that is no multiple of 4 is padded with rows of zeros, whose products are cut off.
    """
    m, k = codes_x.shape
    padded = -(-m // ROWS) * ROWS
    if padded != m:
        rows = F.pad(codes_x.view(torch.uint8), (0, 0, 0, padded - m)).view(codes_x.dtype)
        scales = empty_activation_scales(padded, k, codes_x.device)
        scales.fill_(1.0)[:m] = scales_x
        codes_x, scales_x = rows, scales
    y = F.scaled_mm(
        codes_x, codes_w.t(), scales_x, ScalingType.BlockWise1x128, scales_w.float().t(),
        ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
    )[:m]  # fmt: skip
    launched("scaled_mm")
    return y if bias is None else y.add_(bias)
