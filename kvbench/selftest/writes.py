"""Faults of what is stored, injected right behind the store's own write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from kvbench.engines.reference.backends import TORCH
from kvbench_kernels.attention.reference import paged_write_torch
from kvbench_kernels.kv.layout import LayerPages


@dataclass(frozen=True)
class Side:
    """K or V of one write. x [N, H, D]: what was written; page, offset [N]: where.

    payload [pages, H, page_size, D], scale [pages, H, page_size], or None: the layer's tensors of this side;
    other: the scale of the other side.
    """

    name: str
    x: Tensor
    page: Tensor
    offset: Tensor
    payload: Tensor
    scale: Tensor | None
    other: Tensor | None

    @property
    def codes(self) -> Tensor:
        """[N, H, D], as they are stored."""
        return self.payload[self.page, :, self.offset]

    @property
    def scales(self) -> Tensor:
        """[N, H], as they are stored; zeros where the format stores none a row."""
        if self.scale is None or self.scale.ndim == 1:
            return self.x.new_zeros(self.x.shape[:2])
        return self.scale[self.page, :, self.offset]

    def put_codes(self, codes: Tensor) -> None:
        self.payload[self.page, :, self.offset] = codes.to(self.payload.dtype)

    def put_scales(self, scales: Tensor | float) -> None:
        if self.scale is not None and self.scale.ndim > 1:
            self.scale[self.page, :, self.offset] = (
                scales if isinstance(scales, float) else scales.to(self.scale.dtype)
            )


Change = Callable[[tuple[Side, Side]], None]


def after_write(change: Change, quantized: bool = True) -> Callable[[], AbstractContextManager[Any]]:
    """An inject: `change` is called with K and V after each honest write of a quantized format;
    quantized=False: of any.
    """

    def write(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
        paged_write_torch(cache, k, v, slots, health)
        if cache.fmt.quantized or not quantized:
            where = slots // cache.page_size, slots % cache.page_size
            k_side = Side("k", k, *where, cache.k, cache.k_scale, cache.v_scale)
            change((k_side, Side("v", v, *where, cache.v, cache.v_scale, cache.k_scale)))

    return lambda: patch.object(TORCH, "write", write)


def each_side(change: Callable[[Side], None], only: str = "kv") -> Change:
    """`change` for K and for V, or for one of them."""

    def both(sides: tuple[Side, Side]) -> None:
        for side in sides:
            if side.name in only:
                change(side)

    return both
