"""Live bytes of the KV store at the cell's batch and context, layer by layer, against the formula.

The store is made for exactly `batch` sequences of `context` tokens and all of its pages are taken, so nothing is an
estimate: bytes are those of the live tensors. What they hold does not change their size; on a GPU the pages are filled
by a real prefill and one decode step, because there the peak of allocated memory is measured, and its parts each at a
moment of its own: what is held before there is any page (weights, and beyond them `held_bytes`), the pages from their
tensors, and what the run adds to what was there when it began (`workspace_bytes`). A store that keeps a second copy of
its pages is in none of the parts, so they then miss the peak.
The expected bytes come from the format that the decision resolved, never from the store's own idea of its format.
The bytes of the weights (`kvbench.runners.weight_bytes`) and the time to load them are those of the cell's model, whatever
its batch and context.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import KvbenchError
from kvbench.formats.kv import KV_FORMATS, kv_bytes
from kvbench.runners.context import Context, Measurement
from kvbench.runners.weight_bytes import weight_facts, weights_bytes

if TYPE_CHECKING:
    from kvbench.engines.reference.engine import Engine


def run(ctx: Context) -> Measurement:
    batch, context = ctx.spec["batch"], ctx.spec["context"]
    weights = weights_bytes(ctx.model.model)
    peak = workspace = held = None  # not measured on a CPU
    on_gpu = _has_counters(ctx.model.device)
    if on_gpu:
        gc.collect()  # an engine of an earlier cell that nobody uses is not held
        held = torch.cuda.memory_allocated(ctx.model.device) - weights
    engine = ctx.engine(sequences=batch, tokens=context)
    store = engine.store
    seqs = [engine.add() for _ in range(batch)]
    if on_gpu:
        peak, workspace = _fill_on_gpu(engine, seqs, context)
    else:
        for seq in seqs:
            store.reserve(seq, context)
            store.commit(seq, context)
    table = store.tables(seqs)
    if table.numel() != store.num_pages:
        raise KvbenchError(
            f"{batch} sequences of {context} tokens take {table.numel()} pages, the store has {store.num_pages}; "
            "its bytes would not be those of this batch and context."
        )
    tokens = table.numel() * store.page_size
    fmt, native = KV_FORMATS[engine.decision.kv_format.resolved], KV_FORMATS["native"]
    native_dtype = _name(ctx.model.dtype)
    layers = []
    for index, layer in enumerate(engine.layers):
        live, expected = store.live_bytes(index), kv_bytes(fmt, layer.shape, tokens, native_dtype)
        pages = store.layers[index]
        layers.append(
            {
                "layer": index,
                "payload": live.payload,
                "scales": live.scales,
                "expected_payload": expected.payload,
                "expected_scales": expected.scales,
                "dtype": " + ".join(sorted({_name(pages.k.dtype), _name(pages.v.dtype)})),
            }
        )
    facts: dict[str, Any] = {
        "tokens": tokens,
        "page_table_bytes": table.numel() * table.element_size(),
        "held_bytes": held,
        "workspace_bytes": workspace,
        **weight_facts(ctx.model, engine.decision.weights.resolved),
        "native_dtype": native_dtype,
        "native16_bytes": sum(
            kv_bytes(native, layer.shape, tokens, "float16").total for layer in engine.layers
        ),
        "device_peak_bytes": peak,
    }
    return Measurement({"layers": layers}, facts)


def _has_counters(device: torch.device) -> bool:
    """Whether torch counts what is allocated on the device."""
    return device.type == "cuda"


def _fill_on_gpu(engine: Engine, seqs: list[int], context: int) -> tuple[int, int]:
    """Fill all pages by a prefill and one decode step a sequence; (peak bytes, of them beyond what was there before)."""
    device, vocab = engine.model.device, engine.model.vocab_size
    engine.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if context > 1:
        for seq in seqs:
            engine.prefill(seq, [i % vocab for i in range(context - 1)])
    engine.decode(seqs, [0] * len(seqs))
    engine.synchronize()
    peak = torch.cuda.max_memory_allocated(device)
    return peak, peak - before


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
