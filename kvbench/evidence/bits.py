"""Tensors compared as what they are: raw bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def bits(x: Tensor) -> Tensor:
    """The raw bytes of a tensor, so that NaN payloads and signed zeros compare as what they are."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
