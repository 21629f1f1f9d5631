"""Copies pages to the host and back, bit for bit: payload and scales of a sequence's pages, layer by layer.

On a GPU the host's buffers are pinned and the copies run asynchronously; each function returns when all are
done. A static scale belongs to no page and stays where it is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engines.reference.kv.layer import dtype_name
from kvbench_kernels.kv.layout import LayerPages

# Scattered pages are gathered on the device before they cross the bus, this many bytes at a time: a copy
# takes far longer than its launch, and still fits when the store fills the device.
STAGING_BYTES = 32 * 2**20
WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class HostPages:
    """A swapped sequence on the host. layers: name -> [pages, ...], named as by `LayerPages.paged`."""

    layers: tuple[dict[str, Tensor], ...]

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        return tuple(sum(t.numel() * t.element_size() for t in layer.values()) for layer in self.layers)

    @property
    def pinned(self) -> bool:
        return all(t.is_pinned() for layer in self.layers for t in layer.values())

    @property
    def precision(self) -> str:
        """`int8 + float16 scales`: the dtypes that the buffers have, not those that they should have."""
        named = [(name.endswith("scale"), dtype_name(t.dtype)) for x in self.layers for name, t in x.items()]
        payload = sorted({dtype for is_scale, dtype in named if not is_scale})
        scales = sorted({f"{dtype} scales" for is_scale, dtype in named if is_scale})
        return " + ".join(payload + scales)


@dataclass(frozen=True)
class Transfer:
    """One swap. way: "out" or "in"; layer_bytes: bytes moved, by layer; precision: dtypes on the host."""

    way: str
    layer_bytes: tuple[int, ...]
    precision: str

    @property
    def bytes(self) -> int:
        return sum(self.layer_bytes)


def copy_out(layers: Sequence[LayerPages], pages: Tensor) -> HostPages:
    """The content of `pages` [n] int64, which stays as it is, in new buffers on the host."""
    saved = []
    for layer in layers:
        host = {}
        for name, live in layer.paged().items():
            shape = (len(pages), *live.shape[1:])
            host[name] = torch.empty(shape, dtype=live.dtype, pin_memory=pages.is_cuda)
            for part, ids in _parts(host[name], pages):
                part.copy_(_rows(live)[ids], non_blocking=True)
        saved.append(host)
    _synchronize(pages)
    return HostPages(tuple(saved))


def copy_in(host: HostPages, layers: Sequence[LayerPages], pages: Tensor) -> None:
    """Write what `copy_out` took from as many pages of the same layers into `pages` [n] int64."""
    for layer, saved in zip(layers, host.layers, strict=True):
        for name, live in layer.paged().items():
            for part, ids in _parts(saved[name], pages):
                _rows(live)[ids] = part.to(live.device, non_blocking=True)
    _synchronize(pages)


def _parts(host: Tensor, pages: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows of the host's buffer, ids of their pages), STAGING_BYTES at most and one page at least."""
    rows = _rows(host)
    step = max(1, STAGING_BYTES // (rows.shape[1] * rows.element_size()))
    yield from zip(torch.split(rows, step), torch.split(pages, step), strict=True)


def _rows(paged: Tensor) -> Tensor:
    """[n, ...] as a view [n, integers] of the widest type that divides a page; only bytes are moved."""
    size = math.prod(paged.shape[1:])
    width = next(w for w in WIDTHS if size * paged.element_size() % w.itemsize == 0)
    return paged.view(len(paged), size).view(width)


def _synchronize(pages: Tensor) -> None:
    if pages.is_cuda:
        torch.cuda.current_stream(pages.device).synchronize()
