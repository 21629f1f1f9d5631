"""Swaps of a cell's batch to the host and back: bytes and seconds each way, and a check of every bit.

The pages hold seeded random bytes. While they are on the host, the device's pages are overwritten.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.engines.reference.kv.swap import Transfer
from kvbench.errors import KvbenchError
from kvbench.formats.kv import KV_FORMATS, kv_bytes, page_bytes
from kvbench.runners.context import Context, Measurement

OVERWRITTEN = 0x7F


def run(ctx: Context) -> Measurement:
    batch, context = ctx.spec["batch"], ctx.spec["context"]
    warmup, repeats = ctx.options["warmup"], ctx.options["repeats"]
    engine = ctx.engine(sequences=batch, tokens=context)
    store = engine.store
    seqs = [engine.add() for _ in range(batch)]
    for seq in seqs:
        store.reserve(seq, context)
        store.commit(seq, context)
    _check(store, seqs, fill=True)
    swaps, pinned = [], True
    for order in range(-warmup, repeats):
        ctx.progress(warmup + order, warmup + repeats, "swap")
        out = _timed(engine, engine.swap_out, seqs)
        pinned = pinned and all(store.on_host(seq).pinned for seq in seqs)
        for _, _, live in _tensors(store):
            live.fill_(OVERWRITTEN)
        back = _timed(engine, engine.swap_in, seqs)
        _check(store, seqs)
        swaps += [{"order": order, "way": way, **swap} for way, swap in (("out", out), ("in", back))]
    fmt, native = KV_FORMATS[engine.decision.kv_format.resolved], KV_FORMATS["native"]
    pages, shapes = store.tables(seqs).numel(), [layer.shape for layer in engine.layers]
    size, tokens, dtype = store.page_size, pages * store.page_size, dtype_name(ctx.model.dtype)
    facts: dict[str, Any] = {
        "tokens": tokens,
        "pages": pages,
        "expected_layer_bytes": [pages * page_bytes(fmt, shape, size, dtype) for shape in shapes],
        "native16_bytes": sum(kv_bytes(native, shape, tokens, "float16").total for shape in shapes),
        "pinned": pinned,
        "clock": "perf_counter",
        "synchronised": True,
        "content": "seeded random bytes, compared bit for bit after every swap",
    }
    measured = [swap for swap in swaps if swap["order"] >= 0]
    return Measurement({"swaps": measured, "warmup": swaps[: len(swaps) - len(measured)]}, facts)


def _timed(engine: Engine, swap: Callable[[int], Transfer], seqs: Sequence[int]) -> dict[str, Any]:
    """Swap all sequences one way; a swap returns when its bytes have arrived."""
    engine.synchronize()
    start = time.perf_counter()
    moved = [swap(seq) for seq in seqs]
    engine.synchronize()
    seconds = time.perf_counter() - start
    layers = zip(*(transfer.layer_bytes for transfer in moved), strict=True)
    return {"seconds": seconds, "layer_bytes": [sum(layer) for layer in layers]}


def _tensors(store: PagedKVStore) -> Iterator[tuple[int, str, Tensor]]:
    """(layer, name, bytes [pages, ...]) of all tensors of the pages."""
    for index, layer in enumerate(store.layers):
        for name, tensor in layer.paged().items():
            yield index, name, tensor.view(torch.uint8)


def _content(live: Tensor, pages: int, seed: int) -> Tensor:
    """The bytes of `pages` pages of this tensor, generated again for the comparison."""
    generator = torch.Generator(live.device).manual_seed(seed)
    return live.new_empty((pages, *live.shape[1:])).random_(generator=generator)


def _check(store: PagedKVStore, seqs: Sequence[int], fill: bool = False) -> None:
    """Write the content to the sequences' pages, or raise KvbenchError unless they still hold it."""
    for seed, (seq, (layer, name, live)) in enumerate(itertools.product(seqs, _tensors(store))):
        pages = store.tables([seq])[0]
        content = _content(live, len(pages), seed)
        if fill:
            live[pages] = content
        elif not torch.equal(live[pages], content):
            raise KvbenchError(
                f"Layer {layer}: {name} of sequence {seq} changed when its pages were swapped to the host "
                "and back; such a swap loses the cache, so the cell has no result."
            )
