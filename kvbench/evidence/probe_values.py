"""What the probes share: inputs, stored codes read, changed and poisoned, bits compared, verdicts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import indexable
from kvbench.engines.reference.kv.store import PagedKVStore, WriteObserver
from kvbench.formats.kv import SIDES
from kvbench.records.record import MISMATCH, VERIFIED, Level
from kvbench.text import and_more
from kvbench_kernels.kv.layout import LayerPages

Make = Callable[[int, int], Engine]  # (sequences, tokens) -> an engine made like the measured one

# One of these moves the logits if the scale is read: doubling it moves none where a softmax is saturated.
FACTORS = (2.0, 2.0**-10)


def level_of(name: str, faults: Sequence[str], wrong: str, right: str, **facts: Any) -> Level:
    """A mismatch that names the first of the faults, or the level verified. wrong, right: their sentences."""
    facts |= {"faults": len(faults), "first_faults": list(faults[:4])}
    if faults:
        return Level(name, MISMATCH, f"{wrong}: {faults[0]}{and_more(faults)}.", facts)
    return Level(name, VERIFIED, right, facts)


def probe_ids(engine: Engine, count: int) -> list[int]:
    vocab: int = engine.model.vocab_size
    return [(7919 * i + 13) % vocab for i in range(count)]


def words(name: str) -> str:
    """ "k_scale" -> "K scale", "v" -> "V payload"."""
    return name[0].upper() + (" scale" if name.endswith("scale") else " payload")


def eager(engine: Engine, splits: int | None = None) -> AbstractContextManager[None]:
    """Forwards inside the `with` are neither captured nor compiled."""
    return engine.eagerly(lambda attention: attention, splits)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the raw bytes are equal: NaN payloads and signed zeros count."""
    raw = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


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
    """codes [tokens, heads, dim]; where all are zero (a static scale far too large), codes that differ by
    token.

    K moves no logit while V is zero or equal for all tokens, and the scale of zeros moves none at all.
    """
    if bool((codes.float() != 0).any()):
        return codes
    one = changed(codes)
    odd = torch.arange(len(codes), device=codes.device)[:, None, None] % 2 == 1
    return torch.where(odd, indexable(changed(one)), indexable(one)).view(codes.dtype)


def poison(pages: LayerPages, outside: Tensor) -> None:
    """Fill the slots marked in `outside` [pages, page_size] with NaN, or 127 where the dtype has none."""
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


class _StaticScales(WriteObserver):
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
    """Eager writes inside the `with` use the static scales `given`, by (layer, name)."""
    return store.observed(_StaticScales(store, given))
