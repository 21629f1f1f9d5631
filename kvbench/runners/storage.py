"""Live bytes of the KV store at the cell's batch and context, layer by layer, against the formula.

The store is made for exactly `batch` sequences of `context` tokens, and all its pages are in use. On a GPU a
real prefill and one decode step fill them, and the parts of the peak are measured separately: memory before
there are pages (weights, `held_bytes`), the tensors of the pages, and what the run adds (`workspace_bytes`).
With a second copy of the pages these would not add up to the peak.
"""

import gc
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.load import LoadedModel
from kvbench.errors import KvbenchError
from kvbench.evidence.stored_weights import fp8_modules
from kvbench.formats.kv import DTYPE_BYTES, KV_FORMATS, WEIGHT_FORMATS, kv_bytes, weight_bytes
from kvbench.runners.context import Context, Measurement


def run(ctx: Context) -> Measurement:
    batch, context = ctx.spec["batch"], ctx.spec["context"]
    weights = weights_bytes(ctx.model.model)
    peak = workspace = held = None  # not measured on a CPU
    on_gpu = _has_counters(ctx.model.device)
    if on_gpu:
        gc.collect()  # frees the unused engine of an earlier cell
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
            f"{batch} sequences of {context} tokens use {table.numel()} pages, but the store has "
            f"{store.num_pages}; its bytes are not those of this batch and context."
        )
    tokens = table.numel() * store.page_size
    fmt, native = KV_FORMATS[engine.decision.kv_format.resolved], KV_FORMATS["native"]
    native_dtype = dtype_name(ctx.model.dtype)
    layers = []
    for index, layer in enumerate(engine.layers):
        live, expected = store.live_bytes(index), kv_bytes(fmt, layer.shape, tokens, native_dtype)
        dtypes = {dtype_name(x.dtype) for x in (store.layers[index].k, store.layers[index].v)}
        row = {"layer": index, **asdict(live), "dtype": " + ".join(sorted(dtypes))}
        layers.append(row | {f"expected_{name}": size for name, size in asdict(expected).items()})
    facts: dict[str, Any] = {"device_peak_bytes": peak, "held_bytes": held, "workspace_bytes": workspace}
    facts |= {
        "tokens": tokens,
        "page_table_bytes": table.nbytes,
        **weight_facts(ctx.model, engine.decision.weights.resolved),
        "native_dtype": native_dtype,
        "native16_bytes": sum(kv_bytes(native, x.shape, tokens, "float16").total for x in engine.layers),
    }
    return Measurement({"layers": layers}, facts)


def _has_counters(device: torch.device) -> bool:
    """Whether torch counts allocations on the device."""
    return device.type == "cuda"


def _fill_on_gpu(engine: Engine, seqs: list[int], context: int) -> tuple[int, int]:
    """Fill all pages by a prefill and one decode step; (peak bytes, peak beyond those allocated before)."""
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


def weights_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and saved buffers; tied tensors count once."""
    return sum(size for _, size in {(t.data_ptr(), t.nbytes) for t in model.state_dict().values()})


def weight_facts(loaded: LoadedModel, weights: str) -> dict[str, Any]:
    """Bytes of the loaded weights and of the formula. weights: the resolved format.

    The formula takes shapes from a model built from the config, and formats from the decision, so that a
    weight that was dequantized or is held twice does not confirm itself.
    """
    if (weights != "native") != bool(loaded.weights.modules):
        raise KvbenchError(
            f"weights {weights} were resolved, but {len(loaded.weights.modules)} layers of the loaded model "
            f"{loaded.name} are quantized; its bytes are not this cell's."
        )
    live = weights_bytes(loaded.model)
    modules = fp8_modules(loaded.model).values()
    payload = sum(m.weight.nbytes for m in modules)
    scales = sum(m.weight_scale_inv.nbytes for m in modules)
    facts = {"weights_bytes": live, "weight_payload_bytes": payload, "weight_scale_bytes": scales}
    return facts | {
        "weight_native_bytes": live - payload - scales,
        "weight_bytes_formula": formula(loaded, weights),
        "weight_native16_bytes": sum(2 * t.numel() for t in _tensors(loaded).values()),
        "weight_source": loaded.weights.source,
        "load_seconds": loaded.weights.load_seconds,
    }


def formula(loaded: LoadedModel, weights: str) -> dict[str, int]:
    """{"payload", "scales", "native"}: bytes of the model in this format; scales in the dtype held."""
    asked, live, dtype = WEIGHT_FORMATS[weights], fp8_modules(loaded.model), dtype_name(loaded.dtype)
    payload = scales = native = 0
    converted = {f"{name}.weight": name for name in loaded.weights.modules}
    for key, tensor in _tensors(loaded).items():
        name = converted.get(key)
        if asked.quantized and name is not None:
            scale = dtype_name(live[name].weight_scale_inv.dtype) if name in live else str(asked.scale_dtype)
            n, k = tensor.shape
            expected = weight_bytes(asked, n, k, dtype, scale)
            payload += expected.payload
            scales += expected.scales
        else:
            element = DTYPE_BYTES[dtype] if tensor.is_floating_point() else tensor.element_size()
            native += tensor.numel() * element
    return {"payload": payload, "scales": scales, "native": native}


def _tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers of the model by its config, without storage; tied ones once."""
    with torch.device("meta"):
        made = type(loaded.model)(loaded.model.config)
    buffers = {k: t for k, t in made.state_dict(keep_vars=True).items() if not isinstance(t, nn.Parameter)}
    return {**dict(made.named_parameters()), **buffers}
