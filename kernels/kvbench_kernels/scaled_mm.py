"""FP8 activations times FP8 weights, both with block scales, by torch's own product (cuBLAS and CUTLASS on Hopper GPUs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from kvbench_kernels.launches import launched

ROWS = 4  # the product takes multiples of so many rows


def scaled_mm(
    codes_x: Tensor, scales_x: Tensor, codes_w: Tensor, scales_w: Tensor, bias: Tensor | None
) -> Tensor:
    """codes_x [M, K] with scales_x [M, K/128], codes_w [N, K] with scales_w [N/128, K/128] -> [M, N] bfloat16.

    Codes and scales of x as `activation.quantize_activation` makes them: where M is no multiple of 4, the rows up to the
    next one are read too, whatever they hold, and their products cut off. Scales of w that are not float32 are widened
    first. Raises ValueError where there is no memory behind x's rows. Torch twin: `w8a8.w8a8_torch`.
    """
    m = len(codes_x)
    rows = -(-m // ROWS) * ROWS
    y = F.scaled_mm(
        _rows(codes_x, rows), codes_w.t(), _rows(scales_x, rows), ScalingType.BlockWise1x128, scales_w.float().t(),
        ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
    )[:m]  # fmt: skip
    launched("scaled_mm")
    return y if bias is None else y.add_(bias)


def _rows(x: Tensor, rows: int) -> Tensor:
    """x with the rows that lie behind it in memory."""
    if rows == len(x):
        return x
    last = x.storage_offset() + (rows - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1)
    if (last + 1) * x.element_size() > x.untyped_storage().nbytes():
        raise ValueError(
            f"There is no memory for {rows} rows behind x's {len(x)}, and torch's product takes multiples of {ROWS}; make codes "
            "and scales with quantize_activation."
        )
    return x.as_strided((rows, x.shape[1]), x.stride())
