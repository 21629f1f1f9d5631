"""Bytes of the KV store and of the weights: exact integers (numel x itemsize of the live tensors), compared
with the formulas of docs/formats.md and with the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.metrics.value import Value, incomparable
from kvbench.records.record import Record

# Metrics that are counted once, whole, by the runner.
FACTS = {
    "weight_bytes": "weights_bytes",
    "weight_payload_bytes": "weight_payload_bytes",
    "weight_scale_bytes": "weight_scale_bytes",
    "weight_native_bytes": "weight_native_bytes",
    "model_load_s": "load_seconds",
    "page_table_bytes": "page_table_bytes",
    "held_bytes": "held_bytes",
    "workspace_bytes": "workspace_bytes",
    "device_peak_bytes": "device_peak_bytes",
}

# Parts of the formula of the weights, and what their facts are called.
_PARTS = {"payload": "payload", "scales": "scale", "native": "native"}


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    layers, facts = record.samples["layers"], record.facts
    payload = sum(layer["payload"] for layer in layers)
    scales = sum(layer["scales"] for layer in layers)
    total, n = payload + scales, len(layers)
    yield Value("kv_bytes_total", total, n)
    yield Value("kv_bytes_payload", payload, n)
    yield Value("kv_bytes_scales", scales, n)
    if facts["tokens"]:
        yield Value("kv_bytes_per_token", total / facts["tokens"], n)
    if facts["native16_bytes"]:
        yield Value("kv_ratio_16bit", total / facts["native16_bytes"], n)
    for metric, fact in FACTS.items():
        yield Value(
            metric, facts.get(fact), note="" if facts.get(fact) is not None else "not measured on this device"
        )

    off = {layer["layer"]: _difference(layer) for layer in layers if any(_difference(layer))}
    yield Value(
        "kv_bytes_difference", sum(abs(d) for pair in off.values() for d in pair), n, note=_blame(off, n)
    )

    yield from _weights(facts, baseline)
    if baseline:
        note = incomparable(record, baseline, ["tokens"])
        native = sum(layer["payload"] + layer["scales"] for layer in baseline.samples["layers"])
        if not native:
            note = note or "the baseline's store holds no byte"
        yield Value("kv_ratio", None if note else total / native, n, note=note)


def _weights(facts: Mapping[str, Any], baseline: Record | None) -> Iterator[Value]:
    total, formula = facts["weights_bytes"], facts.get("weight_bytes_formula")
    if formula:
        off = {part: facts[f"weight_{name}_bytes"] - formula[part] for part, name in _PARTS.items()}
        wrong = ", ".join(f"{part} {d:+,} B" for part, d in off.items() if d)
        yield Value("weight_bytes_difference", sum(map(abs, off.values())), note=wrong)
        yield Value("weight_ratio_16bit", total / facts["weight_native16_bytes"])
    if baseline:
        native = baseline.facts.get("weights_bytes")
        yield Value(
            "weight_ratio",
            total / native if native else None,
            note="" if native else "the baseline holds no weights",
        )


def _difference(layer: dict[str, int]) -> tuple[int, int]:
    """(payload, scales): live bytes less the formula's."""
    return layer["payload"] - layer["expected_payload"], layer["scales"] - layer["expected_scales"]


def _blame(off: dict[int, tuple[int, int]], layers: int) -> str:
    if not off:
        return ""
    first, (payload, scales) = next(iter(off.items()))
    return (
        f"{len(off)} of {layers} layers differ from the formula, the first is layer {first}: "
        f"payload {payload:+,} B, scales {scales:+,} B"
    )
