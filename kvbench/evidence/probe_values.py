"""Stored codes as probes handle them: read, changed, made visible, poisoned, and written with other static scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from kvbench.engines.reference.kv.layer import indexable
from kvbench.engines.reference.kv.store import PagedKVStore
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


@contextmanager
def written_with(store: PagedKVStore, given: Mapping[tuple[int, str], Tensor]) -> Iterator[None]:
    """Eager writes inside the `with` take static scales from `given`, by layer and name, whatever the store holds: what a
    changed one then moves is what reads it."""
    honest, before = store.write, vars(store).get("write")

    def write(layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        live = {
            name: getattr(store.layers[layer], name)
            for name in ("k_scale", "v_scale")
            if (layer, name) in given
        }
        held = {name: tensor.clone() for name, tensor in live.items()}
        for name, tensor in live.items():
            tensor.copy_(given[layer, name])
        honest(layer, slots, k, v)
        for name, tensor in live.items():
            tensor.copy_(held[name])

    vars(store)["write"] = write
    try:
        yield
    finally:
        del vars(store)["write"]
        if before is not None:
            vars(store)["write"] = before
