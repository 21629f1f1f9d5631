"""KLD (as in `perplexity`) with one part of the cache quantized at a time, the worst layer by name, and the
effect of keeping the suggested layers native.
"""

from collections.abc import Iterator, Mapping
from math import inf
from statistics import fmean
from typing import Any

from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import NAT
from kvbench.metrics.declare.value import Value, clustered, worst_place
from kvbench.records.record import Record
from kvbench.stats.intervals import Estimate, clustered_mean, clustered_ratio, largest

Part = Mapping[str, Any]

# metric -> kind and name of the part whose KLD it is.
_PARTS: dict[str, tuple[str, str | None]] = {
    "sens_kld_all": ("all", None),
    "sens_kld_k": ("side", "k"),
    "sens_kld_v": ("side", "v"),
    "sens_kld_first": ("tokens", "first"),
    "sens_kld_others": ("tokens", "others"),
    "sens_kld_suggested": ("suggested", None),
}


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    parts = {(part["kind"], part["of"]): part for part in record.samples["parts"]}
    for metric, key in _PARTS.items():
        if key in parts:
            note = _suggestion(record.facts) if key[0] == "suggested" else ""
            yield clustered(metric, kld(parts[key]), _tokens(parts[key]), note)
    if baseline is None:
        return  # native has only `all`: native run again, 0
    if ("suggested", None) not in parts:
        yield Value("sens_kld_suggested", None, 0, note=_suggestion(record.facts))
    whole = parts["all", None]
    alone = {i: kld(part) for (kind, i), part in parts.items() if kind == "alone"}
    kept = {i: gain(whole, part) for (kind, i), part in parts.items() if kind == "kept"}
    yield _worst("sens_layer_alone", alone, whole)
    yield _worst("sens_layer_gain", kept, whole)


def kld(part: Part) -> Estimate:
    """Mean over the scored tokens, its interval over texts."""
    texts = part["texts"]
    return clustered_mean([t[1] for t in texts], [t[0] for t in texts], range(len(texts)))


def gain(whole: Part, kept: Part) -> Estimate:
    """Reduction of the mean KLD by keeping a layer native, paired text by text; below 0 where it
    increases."""
    pairs = list(zip(whole["texts"], kept["texts"], strict=True))
    return clustered_ratio([a[1] - b[1] for a, b in pairs], [a[0] for a, _ in pairs], range(len(pairs)))


def _worst(metric: str, found: Mapping[Any, Estimate], whole: Part) -> Value:
    worst = largest(e.value for e in found.values())
    at = worst_place([(e.value, i) for i, e in found.items()], worst)
    note = f"layer {at}; mean {fmean(e.value for e in found.values()):.3g}"
    return clustered(metric, found[at], _tokens(whole), note)


def _tokens(part: Part) -> int:
    return int(sum(t[0] for t in part["texts"]))


def _suggestion(facts: Mapping[str, Any]) -> str:
    """`layers 0, 3 native: 744 B per token more (+6.3%)`, or why there is no such list."""
    layers, extra = facts["suggested"], facts["suggested_extra_bytes_per_token"]
    if not layers:
        smallest = min(facts["extra_bytes_per_token"])
        if smallest > facts["budget_bytes_per_token"]:
            one = smallest / facts["quantized_bytes_per_token"]
            return f"no layer fits {facts['budget_pct']:g}% more bytes; one takes {one:.1%}"
        return "no layer gains by being native"
    listed = ", ".join(map(str, layers))
    share = extra / facts["quantized_bytes_per_token"]
    return (
        f"layer{'s' if len(layers) > 1 else ''} {listed} native: {extra:,.0f} B per token more ({share:+.1%})"
    )


# Facts that must be equal in two runs that are compared.
FACTS: tuple[str, ...] = ("text_sha",)

TABLES: tuple[Table, ...] = (
    Table("sensitivity", "Sensitivity", counted="tokens",
          note="KLD from native with a part of the cache quantized and the rest stored natively; the notes "
               "name the layers. The effects of several layers do not add up, so the suggested list was "
               "run too.",
          metrics=(
        Metric("sens_kld_all", NAT, "lower", "All quantized",
               "mean KLD of the next-token distribution with the whole cache quantized from that with a "
               "native cache; on a native cell: of native run again",
               sampled=True, none=0.0, brief=True),
        Metric("sens_kld_k", NAT, "lower", "K alone",
               "mean KLD from a native cache with K quantized in every layer and V native",
               paired=True, sampled=True, none=0.0, brief=True),
        Metric("sens_kld_v", NAT, "lower", "V alone",
               "mean KLD from a native cache with V quantized in every layer and K native",
               paired=True, sampled=True, none=0.0, brief=True),
        Metric("sens_kld_first", NAT, "lower", "First tokens alone",
               "mean KLD from a native cache with the first tokens of a text quantized (runner option "
               "first_tokens) and the others native",
               paired=True, sampled=True, none=0.0),
        Metric("sens_kld_others", NAT, "lower", "All but first tokens",
               "mean KLD from a native cache with the first tokens of a text native and the others "
               "quantized", paired=True, sampled=True, none=0.0),
        Metric("sens_layer_alone", NAT, "lower", "Worst layer alone",
               "mean KLD with one layer quantized and the others native, for the layer where it is largest",
               paired=True, sampled=True, none=0.0, brief=True),
        Metric("sens_layer_gain", NAT, "", "Most from one native",
               "reduction of the mean KLD of a quantized cache by keeping one layer native, for the layer "
               "where it is largest", plausible=(-inf, inf), paired=True, sampled=True, none=0.0, brief=True),
        Metric("sens_kld_suggested", NAT, "lower", "Suggested native",
               "mean KLD from a native cache with the suggested layers native and the others quantized",
               paired=True, sampled=True, none=0.0, brief=True),
    )),
)  # fmt: skip
