"""Bytes of the KV store and of the weights, counted from the live tensors, compared with the formulas of
docs/formats.md and with the baseline."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import inf
from typing import Any

from kvbench.metrics.declare.change import exact_change
from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import BYTES, BYTES_PER_TOKEN, RATIO, SECONDS
from kvbench.metrics.declare.value import Value, incomparable
from kvbench.records.record import Record

# Metrics that are facts of the record, and those whose fact has another name.
_PARTS = {"payload": "weight_payload_bytes", "scales": "weight_scale_bytes", "native": "weight_native_bytes"}
_FACTS = (*_PARTS.values(), "page_table_bytes", "held_bytes", "workspace_bytes", "device_peak_bytes")
_COUNTED = {
    "weight_bytes": "weights_bytes",
    "model_load_s": "load_seconds",
    **{name: name for name in _FACTS},
}


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
    for metric, fact in _COUNTED.items():
        note = "" if facts.get(fact) is not None else "not measured on this device"
        yield Value(metric, facts.get(fact), note=note)

    off = {layer["layer"]: _difference(layer) for layer in layers if any(_difference(layer))}
    difference = sum(abs(d) for pair in off.values() for d in pair)
    yield Value("kv_bytes_difference", difference, n, note=_first_off(off, n))
    yield from _weights(facts, baseline)
    if baseline:
        note = incomparable(record, baseline, ["tokens"])
        native = sum(layer["payload"] + layer["scales"] for layer in baseline.samples["layers"])
        if not native:
            note = note or "the baseline's store is empty"
        yield Value("kv_ratio", None if note else total / native, n, note=note)


def _weights(facts: Mapping[str, Any], baseline: Record | None) -> Iterator[Value]:
    total, formula = facts["weights_bytes"], facts.get("weight_bytes_formula")
    if formula:
        off = {part: facts[fact] - formula[part] for part, fact in _PARTS.items()}
        wrong = ", ".join(f"{part} {d:+,} B" for part, d in off.items() if d)
        yield Value("weight_bytes_difference", sum(map(abs, off.values())), note=wrong)
        yield Value("weight_ratio_16bit", total / facts["weight_native16_bytes"])
    if baseline:
        native = baseline.facts.get("weights_bytes")
        note = "" if native else "the baseline holds no weights"
        yield Value("weight_ratio", total / native if native else None, note=note)


def _difference(layer: dict[str, int]) -> tuple[int, int]:
    """(payload, scales): live bytes less the formula's."""
    return layer["payload"] - layer["expected_payload"], layer["scales"] - layer["expected_scales"]


def _first_off(off: dict[int, tuple[int, int]], layers: int) -> str:
    if not off:
        return ""
    first, (payload, scales) = next(iter(off.items()))
    differ = f"{len(off)} of {layers} layers differ from the formula, the first is layer {first}"
    return f"{differ}: payload {payload:+,} B, scales {scales:+,} B"


_bytes_change = partial(exact_change, values)


FACTS: tuple[str, ...] = ("tokens",)
TABLES: tuple[Table, ...] = (
    Table("storage", "Storage",
          note="Bytes are counted from the live tensors and compared with the format's formula, layer by "
               "layer. The ratio to the baseline divides by the baseline cell's live bytes, the ratio to "
               "16-bit by a 2-byte native store of the same shape. On a GPU the peak is the sum of weights, "
               "KV, memory held before the pages were made, and workspace. MiB is 2^20 B, MB is 10^6 B.",
          metrics=(
        Metric("kv_bytes_total", BYTES, "lower", "KV total",
               "payload and scales of all layers, numel x itemsize of the live tensors",
               plausible=(1.0, inf), brief=True, effect=_bytes_change),
        Metric("kv_bytes_per_token", BYTES_PER_TOKEN, "lower", "KV a token",
               "kv_bytes_total over the token slots of the store", brief=True, effect=_bytes_change),
        Metric("kv_ratio_16bit", RATIO, "lower", "Ratio to 16-bit",
               "kv_bytes_total over a 2-byte native store of the same shape and slots",
               plausible=(0.01, 4.0), brief=True),
        Metric("kv_ratio", RATIO, "lower", "Ratio to baseline",
               "kv_bytes_total over the baseline cell's, both live",
               plausible=(0.01, 4.0), paired=True, brief=True),
        Metric("kv_bytes_difference", BYTES, "lower", "Live minus formula",
               "bytes by which live tensors and formula differ, summed by layer; must be 0",
               plausible=(0.0, 0.0), brief=True),
        Metric("kv_bytes_payload", BYTES, "lower", "KV payload", "bytes of the stored K and V of all layers",
               plausible=(1.0, inf), effect=_bytes_change),
        Metric("kv_bytes_scales", BYTES, "lower", "KV scales",
               "bytes of the stored scales of all layers", effect=_bytes_change),
        Metric("page_table_bytes", BYTES, "lower", "Page table", "bytes of it", effect=_bytes_change),
        Metric("held_bytes", BYTES, "lower", "Held before",
               "device memory held in addition to the weights before the pages were allocated: libraries' "
               "workspaces, buffers, rounding"),
        Metric("workspace_bytes", BYTES, "lower", "Workspace",
               "device peak above what was allocated before the run filled its pages"),
        Metric("device_peak_bytes", BYTES, "lower", "Device peak",
               "peak of allocated device memory, weights included", plausible=(1.0, inf)),
    )),
    Table("weights", "Weights", facts=False,
          note="The native remainder is embeddings, output layer and norms, tied ones counted once: where "
               "it is large, FP8 weights take well over half. The ratio to 16-bit divides by 2 bytes per "
               "parameter, the published convention; the ratio to the baseline divides by its live bytes, "
               "4 per parameter in fp32. Files may be cached when load times are measured.",
          metrics=(
        Metric("weight_bytes", BYTES, "lower", "Weights",
               "bytes of the model's parameters and saved buffers in memory, tied ones counted once",
               plausible=(1.0, inf), brief=True, effect=_bytes_change),
        Metric("weight_ratio_16bit", RATIO, "lower", "Ratio to 16-bit",
               "weight_bytes over 2 bytes per parameter, tied ones counted once: the published convention",
               plausible=(0.01, 4.0), brief=True),
        Metric("weight_ratio", RATIO, "lower", "Ratio to baseline",
               "weight_bytes over the baseline cell's, both live",
               plausible=(0.01, 4.0), paired=True, brief=True),
        Metric("weight_bytes_difference", BYTES, "lower", "Live minus formula",
               "bytes by which live weights and formula differ, added up over codes, scales and the rest; "
               "must be 0", plausible=(0.0, 0.0), brief=True),
        Metric("weight_payload_bytes", BYTES, "lower", "FP8 codes",
               "bytes of the weights stored as FP8 codes; 0 where all are native", effect=_bytes_change),
        Metric("weight_scale_bytes", BYTES, "lower", "Scales",
               "bytes of the block scales of FP8 weights", effect=_bytes_change),
        Metric("weight_native_bytes", BYTES, "lower", "Native remainder",
               "weight_bytes without codes and scales: embeddings, norms, output layer, tied ones counted "
               "once", effect=_bytes_change),
        Metric("model_load_s", SECONDS, "lower", "Load time",
               "from the call that loads the model until its weights are on the device, quantization "
               "included; files may be cached", brief=True),
    )),
)  # fmt: skip
