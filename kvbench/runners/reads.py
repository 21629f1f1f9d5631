"""Facts next to the latencies: bytes that a decode step must read, its settings, and the device's copy
bandwidth.

The bytes are a lower bound: data that a path reads twice or keeps in two forms counts once. A step that is
faster than these bytes allow was not a complete step.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvbench.engines.reference.backends import LIBRARY
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.evidence.kernels import ATTENDS, backend_label, run_of

if TYPE_CHECKING:
    from kvbench.engines.reference.engine import Engine

_COPY_BYTES = 2 * 10**9
_LEAST_COPY = 10**8  # a smaller copy stays in the cache


def arm_facts(engine: Engine) -> dict[str, Any]:
    """{"settings": the engine's, after its requests; "reads": bytes that a decode step must read}."""
    run, decision = run_of(engine), engine.decision
    kernels = sorted({name for _, name in run.calls if name == LIBRARY or name.startswith(ATTENDS)})
    return {
        "settings": {
            "weights": decision.weights.resolved,
            "gemm": decision.gemm.resolved,
            "backend": backend_label(engine),
            "decode": engine.decode_mode,
            "compile": engine.compile_mode,
            "device": str(engine.model.device),
            "dtype": dtype_name(engine.model.dtype),
            "splits": sorted(run.splits),
            "kernels": kernels,
        },
        "reads": {
            "weight_bytes": step_weight_bytes(engine.model.model),
            "kv_bytes_per_token": kv_bytes_per_token(engine),
        },
    }


def step_weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that every decode step reads: all but input embeddings and experts, tied ones
    once.

    A step reads one row of an embedding a token, and some of the experts. An embedding that is also the
    output layer is read whole.
    """
    rows = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tensors = {
        (t.data_ptr(), t.numel() * t.element_size())
        for name, t in model.state_dict().items()
        if t.numel() and name.rpartition(".")[0] not in rows and ".experts." not in f".{name}"
    }
    return sum(size for _, size in tensors)


def kv_bytes_per_token(engine: Engine) -> float:
    """Bytes that each token of context adds to what a step reads; layers with a window are left out."""
    store = engine.store
    live = (
        store.live_bytes(i).total for i, layer in enumerate(engine.layers) if layer.sliding_window is None
    )
    return sum(live) / (store.num_pages * store.page_size)


def device_facts(device: torch.device) -> dict[str, Any]:
    """{"copy_gb_s": bytes read and written a second by a copy on the device, or None, "copy_reason", ...}."""
    if device.type != "cuda":
        return {"copy_gb_s": None, "copy_reason": f"no copy is timed on a {device.type}", "cache_bytes": None}
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    size = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    if size < max(_LEAST_COPY, 4 * cache):
        reason = f"{size:,} B of free memory are too little to time a copy"
        return {"copy_gb_s": None, "copy_reason": reason, "cache_bytes": cache}
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    event: Any = torch.cuda.Event
    rates = []
    for _ in range(8):
        start, stop = (event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize(device)
        rates.append(2 * size / start.elapsed_time(stop) / 1e6)
    return {"copy_gb_s": statistics.median(rates[1:]), "copy_reason": "", "cache_bytes": cache}
