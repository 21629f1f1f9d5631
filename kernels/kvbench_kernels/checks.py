"""Checks of the tensors of a product, before a kernel gets their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expect(
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous: bool = True,
    aligned: bool = False,
) -> None:
    """ValueError for a tensor of another shape, dtype, device or layout.

    contiguous False: only the last axis must be dense. aligned: the first byte must be at a multiple of 16.
    """
    dense = tensor.is_contiguous() if contiguous else tensor.stride(-1) == 1
    fits = tensor.shape == tuple(shape) and tensor.dtype in dtypes and tensor.device == device
    if fits and dense and not (aligned and tensor.data_ptr() % 16):
        return
    layout = "contiguous" if contiguous else "with a dense last axis"
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()} on {tensor.device}; "
        "expected "
        f"{list(shape)} {wanted}, {layout}{', 16-byte aligned' if aligned else ''}, on {device}."
    )
