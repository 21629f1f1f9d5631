"""FP8 activations times FP8 weights, both with block scales, by torch's own product (cuBLAS and CUTLASS on Hopper GPUs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from kvbench_kernels.blockwise import with_rows_behind
from kvbench_kernels.launches import launched

ROWS = 4  # the product takes multiples of so many rows


def scaled_mm(
    codes_x: Tensor, scales_x: Tensor, codes_w: Tensor, scales_w: Tensor, bias: Tensor | None
) -> Tensor:
    """codes_x [M, K] with scales_x [M, K/128], codes_w [N, K] with scales_w [N/128, K/128] -> [M, N] bfloat16.

    Codes and scales of x as `activation.quantize_activation` makes them: the rows behind them up to a multiple of 128 are
    multiplied too, whatever they hold, and cut off. Scales of w that are not float32 are widened first. Raises ValueError where
    there is no room for those rows. Torch twin: `w8a8.w8a8_torch`.
    """
    m, x, sx = len(codes_x), with_rows_behind(codes_x), with_rows_behind(scales_x)
    if len(x) % ROWS or len(x) != len(sx):
        raise ValueError(
            f"There is no memory for whole {ROWS}s of rows behind the {m} of x; make codes and scales with quantize_activation."
        )
    y = F.scaled_mm(
        x, codes_w.t(), sx, ScalingType.BlockWise1x128, scales_w.float().t(),
        ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
    )[:m]  # fmt: skip
    launched("scaled_mm")
    return y if bias is None else y.add_(bias)
