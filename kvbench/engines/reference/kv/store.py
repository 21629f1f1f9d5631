"""The paged KV store: quantizes what is written, dequantizes what is read, and counts what it really holds.

All layers use the same page ids (`pages.py`), each with its own tensors (`layer.py`). A slot is page *
page_size + offset. Memory is left uninitialised: readers slice away what a sequence does not own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvbench.engines.reference.backends import TORCH, Backend
from kvbench.engines.reference.kv.layer import allocate_layer, check_scales
from kvbench.engines.reference.kv.pages import Copy, PageTable
from kvbench.engines.reference.kv.swap import HostPages, Transfer, copy_in, copy_out
from kvbench.errors import UsageError
from kvbench.formats.kv import KVFormat, KVShape, StoredBytes, pages_for
from kvbench_kernels.kv.layout import flat_offset

HEALTH = ("clipped", "nonfinite", "overflow")


class WriteObserver:
    """Called at every write of a store that it observes."""

    def before_write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The K and V to write instead: k, v [n, kv_heads, dim]; slots [n]."""
        return k, v

    def after_write(self, layer: int, slots: Tensor) -> None:
        """The write is done."""


class PagedKVStore:
    """KV pages of all layers, and the sequences in them. One writer; not thread-safe. shapes: one a layer.
    native_dtype: the model's dtype, which `native` stores. scale: (K, V) a layer for a static format, else
    None; UsageError where that does not hold. backend: whose code quantizes and dequantizes."""

    def __init__(
        self,
        fmt: KVFormat,
        shapes: Sequence[KVShape],
        page_size: int,
        num_pages: int,
        native_dtype: torch.dtype,
        device: torch.device | str,
        scale: Sequence[tuple[float, float]] | None = None,
        backend: Backend = TORCH,
    ) -> None:
        checked = check_scales(fmt, len(shapes), scale)
        if page_size < 1 or num_pages < 1:
            sentence = f"A KV store of {num_pages} pages of {page_size} tokens holds nothing"
            raise UsageError(f"{sentence}; both must be at least 1.")
        self.fmt, self.shapes, self.backend = fmt, tuple(shapes), backend
        self.page_size, self.num_pages = page_size, num_pages
        self.native_dtype, self.device = native_dtype, torch.device(device)
        self.observers: tuple[WriteObserver, ...] = ()
        self.layers = [
            allocate_layer(fmt, shape, page_size, num_pages, native_dtype, self.device, layer_scale)
            for shape, layer_scale in zip(self.shapes, checked, strict=True)
        ]
        table = self.table = PageTable(page_size, num_pages)
        self.add, self.free, self.reserve, self.commit = table.add, table.free, table.reserve, table.commit
        self.length, self.state, self.sequences = table.length, table.state, table.sequences
        # [tokens, of them from 8-bit payload]: the kernels count them, also in a CUDA graph.
        self.device_reads = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.transfers: list[Transfer] = []  # every swap so far, each way
        self._host: dict[int, HostPages] = {}
        self._health = torch.zeros((len(self.layers), len(HEALTH)), dtype=torch.int64, device=self.device)
        self._written = [0] * len(self.layers)
        self._replayed = 0  # tokens that graphs have written, in every layer

    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens; full pages are shared, a partly filled last one is copied."""
        child, copy = self.table.fork(seq)
        self._copy_page(copy)
        return child

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens and free the pages beyond them."""
        self._copy_page(self.table.truncate(seq, length))

    def swap_out(self, seq: int) -> Transfer:
        """Move a sequence's used pages, scales included, to the host. An error leaves it resident."""
        used = self.tables([seq])[0, : pages_for(self.length(seq), self.page_size)]
        host = copy_out(self.layers, used)
        self.table.swap_out(seq)
        self._host[seq] = host
        return self._log("out", host)

    def swap_in(self, seq: int) -> Transfer:
        """Bring a swapped sequence back into new pages. An error (StoreFull, for one) leaves it swapped."""
        self.table.swap_in(seq)
        host = self._host[seq]
        try:
            copy_in(host, self.layers, self.tables([seq])[0])
        except BaseException:
            self.table.swap_out(seq)
            raise
        del self._host[seq]
        return self._log("in", host)

    def on_host(self, seq: int) -> HostPages:
        """The host's buffers of a swapped sequence."""
        self.table.expect_swapped(seq)
        return self._host[seq]

    def discard_swapped(self, seq: int) -> None:
        """Give up a swapped sequence and its bytes on the host; `free` refuses it."""
        self.table.discard(seq)
        del self._host[seq]

    def slots_for(self, seq: int, start: int, n: int) -> Tensor:
        """[n] int64 slots of the tokens start .. start + n - 1, which must have pages."""
        pages = self.table.pages(seq)
        if start < 0 or n < 0 or start + n > len(pages) * self.page_size:
            raise ValueError(
                f"Tokens {start} to {start + n} of sequence {seq} have no slots: its {len(pages)} pages "
                f"hold {len(pages) * self.page_size}; reserve them first."
            )
        token = torch.arange(start, start + n)
        page = torch.tensor(pages, dtype=torch.int64)[token // self.page_size]
        return flat_offset(page, self.page_size, token % self.page_size).to(self.device)

    def tables(self, seqs: Sequence[int]) -> Tensor:
        """[B, P] int64 page ids, P that of the longest; -1 where a shorter sequence has no page."""
        rows = [self.table.pages(seq) for seq in seqs]
        width = max((len(row) for row in rows), default=0)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.device).reshape(len(rows), width)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize k [n, kv_heads, head_dim] and v [n, kv_heads, value_dim] (any strides) into slots [n]."""
        for observer in self.observers:
            k, v = observer.before_write(layer, slots, k, v)
        self.backend.write(self.layers[layer], k, v, slots, self._health[layer])
        for observer in self.observers:
            observer.after_write(layer, slots)
        self._written[layer] += k.numel() + v.numel()

    def read(self, layer: int, pages: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K, V [B, kv_heads, length, dim]: the first `length` tokens of the page tables `pages [B, P]`."""
        needed = pages_for(length, self.page_size)
        if needed > pages.shape[1]:
            raise ValueError(f"{length} tokens need {needed} pages; the page table has {pages.shape[1]}.")
        return self.backend.gather(self.layers[layer], pages[:, :needed], length, dtype, self.device_reads)

    @contextmanager
    def observed(self, observer: WriteObserver) -> Iterator[None]:
        """Eager writes inside the `with` pass through the observer, after those already there."""
        kept = self.observers
        self.observers = (*kept, observer)
        try:
            yield
        finally:
            self.observers = kept

    def wrote(self, tokens: int) -> None:
        """Count tokens that a CUDA graph has written in every layer."""
        self._replayed += tokens

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Writes inside the `with` have no rows, and are not counted."""
        kept = list(self._written)
        try:
            yield
        finally:
            self._written = kept

    @property
    def reads(self) -> dict[str, int]:
        """K/V tokens read from pages so far, over all layers, and those of them from 8-bit payload."""
        tokens, quantized = self.device_reads.tolist()
        return {"tokens": tokens, "quantized_tokens": quantized}

    def health(self) -> list[dict[str, int]]:
        """By layer since the store was made: elements written, clipped, nonfinite; rows that overflow."""
        by_graphs = [self._replayed * s.kv_heads * (s.head_dim + s.value_dim) for s in self.shapes]
        return [
            {"layer": i, "elements": self._written[i] + by_graphs[i], **dict(zip(HEALTH, row, strict=True))}
            for i, row in enumerate(self._health.tolist())
        ]

    def live_bytes(self, layer: int) -> StoredBytes:
        """Bytes of the layer's tensors as they are, not as they were asked for."""
        sizes = {name: t.numel() * t.element_size() for name, t in self.layers[layer].tensors().items()}
        return StoredBytes(sizes["k"] + sizes["v"], sizes.get("k_scale", 0) + sizes.get("v_scale", 0))

    def dtype(self, layer: int) -> torch.dtype:
        """The live payload dtype of K."""
        return self.layers[layer].k.dtype

    def page_table_bytes(self) -> int:
        """Bytes of the page tables as they go to the device (int64 entries)."""
        return self.table.entries() * 8

    def _log(self, way: str, host: HostPages) -> Transfer:
        self.transfers.append(Transfer(way, host.layer_bytes, host.precision))
        return self.transfers[-1]

    def _copy_page(self, copy: Copy | None) -> None:
        if copy is not None:
            for tensor in [x for pages in self.layers for x in pages.paged().values()]:
                tensor[copy[1]].copy_(tensor[copy[0]])
