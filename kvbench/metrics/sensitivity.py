"""KLD (as in `perplexity`) with one part of the cache quantized at a time, the worst layer by name, and the
effect of keeping the suggested layers native."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    **{f"sens_kld_{kind}": (kind, None) for kind in ("all", "suggested")},
    **{f"sens_kld_{side}": ("side", side) for side in ("k", "v")},
    **{f"sens_kld_{tokens}": ("tokens", tokens) for tokens in ("first", "others")},
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
    """Reduction of the mean KLD by keeping a layer native, paired text by text."""
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
    listed = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))} native"
    return f"{listed}: {extra:,.0f} B per token more ({extra / facts['quantized_bytes_per_token']:+.1%})"


def _kld(name: str, heading: str, what: str, paired: bool = True, brief: bool = False) -> Metric:
    words = f"mean KLD of the next-token distribution from that of a native cache, with {what}"
    name = f"sens_kld_{name}"
    return Metric(name, NAT, "lower", heading, words, paired=paired, sampled=True, none=0.0, brief=brief)


FACTS: tuple[str, ...] = ("text_sha",)
TABLES: tuple[Table, ...] = (
    Table("sensitivity", "Sensitivity", counted="tokens",
          note="KLD from native with a part of the cache quantized and the rest stored natively; the notes "
               "name the layers. The effects of several layers do not add up, so the suggested list was "
               "run too.",
          metrics=(
        _kld("all", "All quantized", "the whole cache quantized; on a native cell: of native run again",
             paired=False, brief=True),
        _kld("k", "K alone", "K quantized in every layer and V native", brief=True),
        _kld("v", "V alone", "V quantized in every layer and K native", brief=True),
        _kld("first", "First tokens alone",
             "the first tokens of a text quantized (runner option first_tokens) and the others native"),
        _kld("others", "All but first tokens", "the first tokens of a text native and the others quantized"),
        replace(_kld("", "Worst layer alone", "one layer quantized, the one where it is largest", brief=True),
                name="sens_layer_alone"),
        Metric("sens_layer_gain", NAT, "", "Most from one native",
               "reduction of the mean KLD of a quantized cache by keeping one layer native, for the layer "
               "where it is largest", plausible=(-inf, inf), paired=True, sampled=True, none=0.0, brief=True),
        _kld("suggested", "Suggested native", "suggested layers native, the others quantized", brief=True),
    )),
)  # fmt: skip
