"""Which decode kernel serves a shape, by measurement, and what it computes in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench_kernels import decode
from kvbench_kernels.decode import choose_splits, paged_decode

__all__ = ["choose_splits", "decode_kernel", "execution"]


def decode_kernel(
    fmt: str, q: Tensor, k_pages: Tensor, v_pages: Tensor, plain: bool
) -> Callable[..., Tensor]:
    """The fastest kernel that takes this shape. plain: no sliding window, soft-cap or sinks."""
    return paged_decode


def execution(fmt: str, dtype: str) -> str:
    """Operands and accumulator of both products in a decode: "float16 x float16 -> float32". dtype: of queries."""
    return decode.execution(fmt, getattr(torch, dtype))
