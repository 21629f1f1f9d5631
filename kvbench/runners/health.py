"""Numeric health of the cache: what the format does to K and V of a real text, by layer and side.

The text is prefilled once. The K and V that each layer produced are compared with what its pages then hold.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.evidence.attention_values import element_error
from kvbench.evidence.probe_values import stored
from kvbench.files import content_hash
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat
from kvbench.matrix.resolve_backend import check_context
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text.encode import head_ids
from kvbench_kernels.kv.quantize import dequantize


def run(ctx: Context) -> Measurement:
    """Raises Refused("invalid_context") when the text exceeds the model's positions."""
    tokens, piece = ctx.options["tokens"], ctx.spec["prefill_chunk"]
    check_context(ctx.model.facts, tokens, 0)
    ids = head_ids(ctx, tokens)
    engine = ctx.engine(sequences=1, tokens=tokens)
    fmt = KV_FORMATS[engine.decision.kv_format.resolved]
    layers = range(len(engine.store.layers))
    sides = {(layer, name): Side(fmt) for layer in layers for name in SIDES}
    seq = engine.add()
    with torch.inference_mode():
        for start in range(0, tokens, piece):
            ctx.progress(start, tokens, "prefill")
            part = ids[start : start + piece]
            engine.tap_layers = frozenset(layers)
            engine.forward([(seq, part)], "none")
            engine.tap_layers = frozenset()
            slots = engine.store.slots_for(seq, start, len(part))
            for (layer, name), side in sides.items():
                side.add(engine.taps[layer][SIDES.index(name)], *_held(engine, layer, name, slots))
    found = [{"layer": layer, "side": name, **side.numbers()} for (layer, name), side in sides.items()]
    facts = {"tokens": tokens, "text_sha": content_hash(ids), "format": fmt.name}
    facts |= {
        "error_is": "distance of stored from original values, as a share of the original's norm; "
        "clipped elements included",
        "bound_is": "worst element's error over what rounding may give it; clipped elements have no bound",
        "scales_are": "counts by floor(log2(scale))",
    }
    return Measurement({"sides": found}, facts)


def _held(engine: Engine, layer: int, side: str, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes [N, H, D] and scales ([N, H] or one) in the pages at these slots."""
    codes, scale = engine.store.layers[layer].side(side)
    if scale is not None and scale.numel() > 1:
        scale = stored(engine.store, scale, slots)
    return stored(engine.store, codes, slots), scale


@dataclass
class Side:
    """K or V of one layer, summed over chunks of the text."""

    fmt: KVFormat
    elements: int = 0
    nonfinite: int = 0
    amax: float = 0.0
    square: float = 0.0
    square_error: float = 0.0
    clipped: int = 0
    flushed: int = 0
    bound_share: float = 0.0
    codes: set[int] = field(default_factory=set)
    scales: Counter[int] = field(default_factory=Counter)
    scale_min: float = float("inf")
    scale_max: float = 0.0

    def add(self, x: Tensor, codes: Tensor, scale: Tensor | None) -> None:
        """x, codes [N, H, D]; scale [N, H], one element, or None where the format is native."""
        back = dequantize(codes, scale, torch.float32).double()
        x = x.double()
        self.elements += x.numel()
        self.nonfinite += int((~x.isfinite()).sum())
        self.amax = max(self.amax, x.abs().max().item())
        self.square += x.square().sum().item()
        self.square_error += (x - back).square().sum().item()
        self.flushed += int(((back == 0) & (x != 0)).sum())
        given = scale.item() if scale is not None and self.fmt.scale_kind == "static" else None
        self.bound_share = max(self.bound_share, element_error(self.fmt, x, given, back)[0])
        if scale is None:
            return
        self.codes |= set(torch.bincount(codes.view(torch.uint8).flatten()).nonzero().flatten().tolist())
        each = scale.double().flatten()
        self.scales += Counter(each.log2().floor().long().tolist())
        self.scale_min = min(self.scale_min, each.min().item())
        self.scale_max = max(self.scale_max, each.max().item())
        if given is not None and self.fmt.qmax is not None:
            self.clipped += int((x.abs() > given * self.fmt.qmax * (1 + 1e-6)).sum())

    def numbers(self) -> dict[str, Any]:
        plain = ("elements", "nonfinite", "amax", "bound_share", "clipped", "flushed")
        quantized = bool(self.codes)
        return {
            **{name: getattr(self, name) for name in plain},
            "rms": (self.square / self.elements) ** 0.5,
            "error": (self.square_error / self.square) ** 0.5 if self.square else 0.0,
            "codes_used": len(self.codes) if quantized else None,
            "scale_min": self.scale_min if quantized else None,
            "scale_max": self.scale_max if quantized else None,
            "scales_log2": {str(power): self.scales[power] for power in sorted(self.scales)},
        }
