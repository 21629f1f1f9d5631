"""Stored codes as probes handle them: read, changed, made visible, poisoned, and written with other static scales."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kvbench.engines.reference.kv.layer import indexable
from kvbench.engines.reference.kv.store import PagedKVStore, WriteObserver
from kvbench.formats.kv import SIDES
from kvbench_kernels.kv.layout import LayerPages

# By one of these a scale that is read moves the logits: where scores are so large that a softmax is at its end, twice as much moves none.
FACTORS = (2.0, 2.0**-10)


def stored(store: PagedKVStore, payload: Tensor, slots: Tensor) -> Tensor:
    """[N, H, ...] of a tensor [pages, H, page_size, ...] at flat slots."""
    page, offset = slots // store.page_size, slots % store.page_size
    return indexable(payload)[page, :, offset].view(payload.dtype)


def put(store: PagedKVStore, payload: Tensor, slots: Tensor, codes: Tensor) -> None:
    """`codes` [N, H, ...] into such a tensor at flat slots."""
    page, offset = slots // store.page_size, slots % store.page_size
    indexable(payload)[page, :, offset] = indexable(codes)


def changed(codes: Tensor) -> Tensor:
    """Other codes everywhere: sign flipped, and a clearly visible value where the code was zero."""
    if codes.dtype == torch.float8_e4m3fn:
        raw = codes.view(torch.uint8)
        return torch.where((raw & 0x7F) == 0, torch.full_like(raw, 0x38), raw ^ 0x80).view(codes.dtype)
    return torch.where(codes == 0, torch.full_like(codes, 1), -codes)


def shown(codes: Tensor) -> Tensor:
    """codes [tokens, heads, dim], or visible ones that differ from token to token where all are zero (a static scale far too large):
    what K holds moves no logit while V is nothing, or the same for every token, and a scale of zeros none at all."""
    if bool((codes.float() != 0).any()):
        return codes
    one = changed(codes)
    odd = torch.arange(len(codes), device=codes.device)[:, None, None] % 2 == 1
    return torch.where(odd, indexable(changed(one)), indexable(one)).view(codes.dtype)


def poison(pages: LayerPages, outside: Tensor) -> None:
    """Fill the slots marked in `outside` [pages, page_size] with what must never be read: NaN where it exists."""
    for side in SIDES:
        payload: Tensor = getattr(pages, side)
        mask = outside[:, None, :].expand(payload.shape[:3])
        bad = 127 if payload.dtype == torch.int8 else float("nan")
        if payload.dtype == torch.float8_e4m3fn:
            payload.view(torch.uint8)[mask] = 0x7F
        else:
            payload[mask] = bad
        scale: Tensor | None = getattr(pages, f"{side}_scale")
        if scale is not None and scale.numel() > 1:
            scale[mask] = float("nan")


class StaticScales(WriteObserver):
    """Eager writes take static scales from `given`, by (layer, name), whatever the store holds: what a changed scale then
    moves is what reads it."""

    def __init__(self, store: PagedKVStore, given: Mapping[tuple[int, str], Tensor]) -> None:
        self.store, self.given = store, given
        self._held: list[tuple[Tensor, Tensor]] = []

    def before_write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for name in ("k_scale", "v_scale"):
            if (layer, name) in self.given:
                live: Tensor = getattr(self.store.layers[layer], name)
                self._held.append((live, live.clone()))
                live.copy_(self.given[layer, name])
        return k, v

    def after_write(self, layer: int, slots: Tensor) -> None:
        for live, held in self._held:
            live.copy_(held)
        self._held.clear()


def written_with(
    store: PagedKVStore, given: Mapping[tuple[int, str], Tensor]
) -> AbstractContextManager[None]:
    return store.observed(StaticScales(store, given))
