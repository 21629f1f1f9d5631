"""Small stores with known content, for the tests of the store and of what moves its pages."""

import math

import torch
from torch import Tensor

from kvbench.engines.reference.kv.layer import indexable
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench_kernels.attention.reference import paged_attention_torch

FORMATS = list(KV_FORMATS)
SHAPE = KVShape(kv_heads=3, head_dim=8, value_dim=8)


def make(
    fmt: str,
    layers: int = 2,
    shape: KVShape = SHAPE,
    page_size: int = 16,
    pages: int = 12,
    dtype: torch.dtype = torch.float32,
    fill: str = "zero",
) -> PagedKVStore:
    static = KV_FORMATS[fmt].scale_kind == "static"
    scale = [(0.03, 0.05)] * layers if static else None
    store = PagedKVStore(KV_FORMATS[fmt], [shape] * layers, page_size, pages, dtype, "cpu", scale)
    everything = torch.ones(pages, page_size, dtype=torch.bool)
    (zero if fill == "zero" else poison)(store, everything)
    return store


def make_sized(fmt: str, layers: int, shape: KVShape, slots: int) -> PagedKVStore:
    scale = [(1.0, 1.0)] * layers if KV_FORMATS[fmt].scale_kind == "static" else None
    return PagedKVStore(KV_FORMATS[fmt], [shape] * layers, 16, slots // 16, torch.bfloat16, "cpu", scale)


def zero(store: PagedKVStore, slots: Tensor) -> None:
    for layer in store.layers:
        for tensor in layer.paged().values():
            indexable(tensor)[slots[:, None].expand(tensor.shape[:3])] = 0


def poison(store: PagedKVStore, slots: Tensor) -> None:
    """K = 1e4 and V = NaN (native), 0x7F codes, and NaN scales in the marked slots [pages, page_size]."""
    for layer in store.layers:
        for name, tensor in layer.paged().items():
            where = slots[:, None].expand(tensor.shape[:3])
            if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
                tensor.view(torch.uint8)[where] = 0x7F
            else:
                tensor[where] = 1e4 if name == "k" else math.nan


def tokens(n: int, shape: KVShape = SHAPE, seed: int = 0) -> tuple[Tensor, Tensor]:
    """k [n, H, D] and v [n, H, Dv]; a prefix of a longer call's with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(64, shape.kv_heads, shape.head_dim + shape.value_dim, generator=generator)[:n]
    return both[..., : shape.head_dim], both[..., shape.head_dim :]


def append(store: PagedKVStore, seq: int, k: Tensor, v: Tensor) -> None:
    store.reserve(seq, len(k))
    slots = store.slots_for(seq, store.length(seq), len(k))
    for layer in range(len(store.layers)):
        store.write(layer, slots, k * (layer + 1), v * (layer + 1))
    store.commit(seq, len(k))


def filled(store: PagedKVStore, n: int, seed: int = 0) -> int:
    seq = store.add()
    append(store, seq, *tokens(n, store.shapes[0], seed))
    return seq


def content(store: PagedKVStore, seq: int, layer: int = 1) -> Tensor:
    k, v = store.read(layer, store.tables([seq]), store.length(seq), torch.float32)
    return torch.cat((k, v), dim=-1)


def attend(store: PagedKVStore, table: Tensor, length: int, layer: int = 1) -> Tensor:
    """The attention output of one decode step for each row of `table`; every row asks the same query."""
    heads, dim = 3 * store.shapes[0].kv_heads, store.shapes[0].head_dim
    q = torch.randn(1, heads, 1, dim, generator=torch.Generator().manual_seed(9)).expand(
        len(table), -1, -1, -1
    )
    k, v = store.read(layer, table, length, torch.float32)
    return paged_attention_torch(q, k, v, dim**-0.5, length - 1)


def outside(store: PagedKVStore, seq: int) -> Tensor:
    """[pages, page_size] bool: the slots that are not the sequence's."""
    slots = torch.ones(store.num_pages * store.page_size, dtype=torch.bool)
    slots[store.slots_for(seq, 0, store.length(seq))] = False
    return slots.view(store.num_pages, store.page_size)


def state(store: PagedKVStore) -> list[bytes]:
    return [
        t.contiguous().view(torch.uint8).numpy().tobytes()
        for layer in store.layers
        for t in layer.tensors().values()
    ]
