"""Pages: another one than the table's, one that was never rewritten, or a native copy in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.formats.kv import KV_FORMATS
from kvbench.selftest.fault import Fault
from kvbench_kernels.attention.reference import paged_gather_torch, paged_write_torch
from kvbench_kernels.kv.layout import LayerPages

Broken = AbstractContextManager[Any]


def off_by_one() -> Broken:
    """What the other page holds is made small numbers, since memory that nobody wrote may hold anything."""

    def small(held: Tensor | None) -> Any:
        floats = held is not None and held.is_floating_point() and held.element_size() > 1
        return held.nan_to_num(1.0, 1.0, 1.0).clamp(-4, 4) if held is not None and floats else held

    def gather(cache: LayerPages, pages: Tensor, *rest: Any) -> Any:
        fmt, *tensors = cache
        return paged_gather_torch(LayerPages(fmt, *map(small, tensors)), (pages + 1) % len(cache.k), *rest)

    return patch.object(TORCH, "gather", gather)


def rows_exchanged() -> Broken:
    honest = PagedKVStore.tables
    return patch.object(PagedKVStore, "tables", lambda self, seqs: honest(self, seqs).flip(0))


def columns_exchanged() -> Broken:
    """The first two pages of a sequence change places."""

    def gather(cache: LayerPages, pages: Tensor, *rest: Any) -> Any:
        if pages.shape[1] > 1:
            pages = torch.cat([pages[:, :2].flip(1), pages[:, 2:]], 1)
        return paged_gather_torch(cache, pages, *rest)

    return patch.object(TORCH, "gather", gather)


def never_renewed() -> Broken:
    """A slot that was written once keeps what it holds: a page that is used again shows its old content."""

    def write(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
        empty = torch.zeros(len(cache.k) * cache.page_size, dtype=torch.bool)
        full = vars(cache.k).setdefault("full", empty)
        fresh = torch.where(full[slots], -1, slots)
        full[slots] = True
        paged_write_torch(cache, k, v, fresh, health)

    return patch.object(TORCH, "write", write)


def shadow() -> Broken:
    """Payload and scales are written, and attention reads a native copy of them."""
    honest_write, honest_read = PagedKVStore.write, PagedKVStore.read

    def copies(made: PagedKVStore) -> list[LayerPages]:
        if not hasattr(made, "shadow"):
            vars(made)["shadow"] = [
                allocate_layer(
                    KV_FORMATS["native"],
                    shape,
                    made.page_size,
                    made.num_pages,
                    made.native_dtype,
                    made.device,
                )
                for shape in made.shapes
            ]
            for pages in vars(made)["shadow"]:
                pages.k.zero_(), pages.v.zero_()
        found: list[LayerPages] = vars(made)["shadow"]
        return found

    def write(self: PagedKVStore, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        honest_write(self, layer, slots, k, v)
        page, offset, copy = slots // self.page_size, slots % self.page_size, copies(self)[layer]
        copy.k[page, :, offset] = k
        copy.v[page, :, offset] = v

    def read(self: PagedKVStore, layer: int, pages: Tensor, length: int, dtype: torch.dtype) -> Any:
        honest_read(self, layer, pages, length, dtype)  # so that every counter looks right
        copy, used = copies(self)[layer], pages[:, : -(-length // self.page_size)]
        return paged_gather_torch(copy, used, length, dtype)

    return patch.multiple(PagedKVStore, write=write, read=read)


FAULTS: dict[str, Fault] = {
    "page_off_by_one": Fault(
        "Attention reads the page behind the one that the table names.",
        "int8_sym", off_by_one, r"does not read its page \d"),
    "page_stale": Fault(
        "A page that is used again keeps its old content.",
        "int8_sym", never_renewed, r"layer 0 K: the stored scale of token 0, head 0, page \d+ is"),
    "page_table_rows_exchanged": Fault(
        "Sequences of a batch have each other's page tables.",
        "int8_sym", rows_exchanged, r"sequence 0 reads page \d+, which is page \d of sequence 1"),
    "pages_of_a_sequence_exchanged": Fault(
        "The first two pages of a sequence change places.",
        "int8_sym", columns_exchanged,
        r"attention of layer \d is not finite: it reads a page slot|layer \d differs"),
    "native_shadow_is_read": Fault(
        "Attention reads a native copy of K and V, and the quantized pages are for show.",
        "int8_sym", shadow, r"E3-layers: .*layer 0: the stored K payload is not read"),
}  # fmt: skip
