"""Flat offsets into paged tensors, always in 64 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_offset(index: Tensor, stride: int, within: Tensor | int = 0) -> Tensor:
    """index * stride + within as int64, whatever integer dtype `index` has.

    A K page of 16 tokens, 8 heads of 128 has 16,384 elements, so page 131,072 already starts at 2^31.
    """
    return index.to(torch.int64) * stride + within
