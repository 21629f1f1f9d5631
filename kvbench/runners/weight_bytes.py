"""Bytes of a model's weights: live, by what they are, and what the resolved format's formula gives for its config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.errors import KvbenchError
from kvbench.evidence.weight_bytes import fp8_modules
from kvbench.formats.kv import DTYPE_BYTES, WEIGHT_FORMATS, weight_bytes

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
