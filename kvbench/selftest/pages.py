"""Pages: another one than the table's, one that was never rewritten, or a native copy in their place."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.selftest.fault import Broken, Fault, swap
from kvbench.selftest.hops import native_like
from kvbench_kernels.attention.reference import paged_gather_torch, paged_write_torch
from kvbench_kernels.kv.layout import LayerPages

_TABLES, _WRITE, _READ = PagedKVStore.tables, PagedKVStore.write, PagedKVStore.read


def gather_next(cache: LayerPages, pages: Tensor, *rest: Any) -> Any:
    """What the next page holds is made small numbers, since memory that nobody wrote may hold anything."""

    def small(held: Tensor | None) -> Tensor | None:
        if held is None or not held.is_floating_point() or held.element_size() == 1:
            return held
        return held.nan_to_num(1.0, 1.0, 1.0).clamp(-4, 4)

    fmt, *tensors = cache
    shrunk: Any = map(small, tensors)
    return paged_gather_torch(LayerPages(fmt, *shrunk), (pages + 1) % len(cache.k), *rest)


def gather_exchanged(cache: LayerPages, pages: Tensor, *rest: Any) -> Any:
    if pages.shape[1] > 1:
        pages = torch.cat([pages[:, :2].flip(1), pages[:, 2:]], 1)
    return paged_gather_torch(cache, pages, *rest)


def write_once(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
    """A slot that was written once keeps what it holds: a page that is used again shows its old content."""
    empty = torch.zeros(len(cache.k) * cache.page_size, dtype=torch.bool)
    full = vars(cache.k).setdefault("full", empty)
    fresh = torch.where(full[slots], -1, slots)
    full[slots] = True
    paged_write_torch(cache, k, v, fresh, health)


def shadow() -> Broken:
    """Payload and scales are written, and attention reads a native copy of them."""

    def copies(made: PagedKVStore) -> list[LayerPages]:
        if not hasattr(made, "shadow"):
            vars(made)["shadow"] = [native_like(made, layer) for layer in range(len(made.shapes))]
            for pages in vars(made)["shadow"]:
                pages.k.zero_(), pages.v.zero_()
        found: list[LayerPages] = vars(made)["shadow"]
        return found

    def write(self: PagedKVStore, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        _WRITE(self, layer, slots, k, v)
        page, offset, copy = slots // self.page_size, slots % self.page_size, copies(self)[layer]
        copy.k[page, :, offset] = k
        copy.v[page, :, offset] = v

    def read(self: PagedKVStore, layer: int, pages: Tensor, length: int, dtype: torch.dtype) -> Any:
        _READ(self, layer, pages, length, dtype)  # so that every counter looks right
        copy, used = copies(self)[layer], pages[:, : -(-length // self.page_size)]
        return paged_gather_torch(copy, used, length, dtype)

    return patch.multiple(PagedKVStore, write=write, read=read)


FAULTS: dict[str, Fault] = {
    "page_off_by_one": Fault(
        "Attention reads the page behind the one that the table names.",
        swap(TORCH, "gather", gather_next),
        r"does not read its page \d",
    ),
    "page_stale": Fault(
        "A page that is used again keeps its old content.",
        swap(TORCH, "write", write_once),
        r"layer 0 K: the stored scale of token 0, head 0, page \d+ is",
    ),
    "page_table_rows_exchanged": Fault(
        "Sequences of a batch have each other's page tables.",
        swap(PagedKVStore, "tables", lambda self, seqs: _TABLES(self, seqs).flip(0)),
        r"sequence 0 reads page \d+, which is page \d of sequence 1",
    ),
    "pages_of_a_sequence_exchanged": Fault(
        "The first two pages of a sequence change places.",
        swap(TORCH, "gather", gather_exchanged),
        r"attention of layer \d is not finite: it reads a page slot|layer \d differs",
    ),
    "native_shadow_is_read": Fault(
        "Attention reads a native copy of K and V, and the quantized pages are for show.",
        shadow,
        r"E3-layers: .*layer 0: the stored K payload is not read",
    ),
}
