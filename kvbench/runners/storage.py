"""Live bytes of the KV store at the cell's batch and context, layer by layer, against the formula.

The store is made for exactly `batch` sequences of `context` tokens and all of its pages are taken, so nothing is an
estimate: bytes are those of the live tensors. What they hold does not change their size; on a GPU the pages are filled
by a real prefill and one decode step, because there the peak of allocated memory is measured, and its parts each at a
moment of its own: what is held before there is any page (weights, and beyond them `held_bytes`), the pages from their
tensors, and what the run adds to what was there when it began (`workspace_bytes`). A store that keeps a second copy of
its pages is in none of the parts, so they then miss the peak.
The expected bytes come from the format that the decision resolved, never from the store's own idea of its format.
The bytes of the weights (`kvbench.runners.storage`) and the time to load them are those of the cell's model, whatever
its batch and context.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.errors import KvbenchError
from kvbench.evidence.weight_bytes import fp8_modules
from kvbench.formats.kv import DTYPE_BYTES, KV_FORMATS, WEIGHT_FORMATS, kv_bytes, weight_bytes
from kvbench.runners.context import Context, Measurement

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


if TYPE_CHECKING:
    from kvbench.engines.reference.load import LoadedModel


def weights_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and saved buffers; tensors that are one and the same in memory (tied) count once."""
    tensors = {(t.data_ptr(), t.numel() * t.element_size()) for t in model.state_dict().values() if t.numel()}
    return sum(size for _, size in tensors)


def weight_facts(loaded: LoadedModel, weights: str) -> dict[str, Any]:
    """weights: the resolved format. The formula takes shapes from a model made anew from the config, without storage, and
    formats from the decision, so that a weight which was dequantized or is held twice does not vouch for itself.
    """
    if (weights != "native") != bool(loaded.weights.modules):
        raise KvbenchError(
            f"weights {weights} were resolved, and {len(loaded.weights.modules)} layers of the model {loaded.name} that would be "
            "measured are quantized; its bytes are not this cell's."
        )
    live = weights_bytes(loaded.model)
    modules = fp8_modules(loaded.model).values()
    payload = sum(_size(m.weight) for m in modules)
    scales = sum(_size(m.weight_scale_inv) for m in modules)
    return {
        "weights_bytes": live,
        "weight_payload_bytes": payload,
        "weight_scale_bytes": scales,
        "weight_native_bytes": live - payload - scales,
        "weight_bytes_formula": formula(loaded, weights),
        "weight_native16_bytes": sum(2 * t.numel() for t in _tensors(loaded).values()),
        "weight_source": loaded.weights.source,
        "load_seconds": loaded.weights.load_seconds,
    }


def formula(loaded: LoadedModel, weights: str) -> dict[str, int]:
    """{"payload", "scales", "native"}: bytes that the model takes in this format.

    Scales have the dtype in which they are held: a checkpoint may store narrower ones than quantizing makes.
    """
    asked, live = WEIGHT_FORMATS[weights], fp8_modules(loaded.model)
    bytes_ = {"payload": 0, "scales": 0, "native": 0}
    converted = {f"{name}.weight": name for name in loaded.weights.modules}
    for key, tensor in _tensors(loaded).items():
        name = converted.get(key)
        if asked.quantized and name is not None:
            scale = dtype_name(live[name].weight_scale_inv.dtype) if name in live else str(asked.scale_dtype)
            n, k = tensor.shape
            due = weight_bytes(asked, n, k, dtype_name(loaded.dtype), scale)
            bytes_["payload"] += due.payload
            bytes_["scales"] += due.scales
        else:
            floating = tensor.is_floating_point()
            element = DTYPE_BYTES[dtype_name(loaded.dtype)] if floating else tensor.element_size()
            bytes_["native"] += tensor.numel() * element
    return bytes_


def _tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers of the model as its config has it, on no device; tied ones once."""
    with torch.device("meta"):
        made = type(loaded.model)(loaded.model.config)
    buffers = {k: t for k, t in made.state_dict(keep_vars=True).items() if not isinstance(t, nn.Parameter)}
    return {**dict(made.named_parameters()), **buffers}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
