"""Perplexity is exp of the mean NLL. `stream512`: the text is tokenized once and cut into chunks of 512, the
first token of a chunk is not scored. `rows512`: the same within each row. `llamacpp`: the second half of each
chunk is scored, as in llama.cpp. KLD is from the native distribution to the candidate's, over the full
vocabulary."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from kvbench.data.corpora import evenly
from kvbench.metrics.declare.change import log_change, percent, same, share_change
from kvbench.metrics.declare.metric import DIVERGENCE, TEXT, Effect, Measured, Metric, Table, Unable
from kvbench.metrics.declare.units import NAT, PERCENT, PERPLEXITY, POINTS, SHARE
from kvbench.metrics.declare.value import Value, clustered, incomparable, joined
from kvbench.records.record import Record
from kvbench.stats import intervals as stats
from kvbench.stats.intervals import Estimate, clustered_mean, clustered_ratio, exp

# The protocol is part of the number: all of these must be equal.
COMPARABLE = (
    "protocol", "split", "bos", "text", "text_cut", "chunk", "stride", "tokens", "scored", "data_sha",
)  # fmt: skip

Chunk = Mapping[str, Any]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    chunks = record.samples["chunks"]
    scored, expected = sum(chunk["tokens"] for chunk in chunks), record.facts["scored"]
    if scored != expected:
        note = f"the record says {expected} scored tokens, its chunks hold {scored}"
        yield Value("ppl", None, scored, note=note)
    elif scored == 0:
        yield Value("ppl", None, 0, note="no token was scored")
    else:
        yield Value("ppl", exp(math.fsum(chunk["nll"] for chunk in chunks) / scored), scored)
        if baseline:
            yield from _deltas(record, baseline, scored)
        yield from _by_position(record, baseline)
    yield from _divergence(record.samples)


def _deltas(record: Record, baseline: Record, scored: int) -> Iterator[Value]:
    """The candidate's change, and that of the baseline run again: the noise floor."""
    chunks, native = record.samples["chunks"], baseline.samples["chunks"]
    note = incomparable(record, baseline, COMPARABLE)
    if not note and _layout(chunks) != _layout(native):
        note = "not comparable with the baseline: the chunks do not score the same tokens"
    if note:
        yield Value("ppl_delta_pct", None, scored, note=note)
        return
    again, floor = record.samples.get("native_chunks"), ""
    if again and _layout(again) == _layout(native):
        noise = clustered_ratio(*_differences(again, native))
        floor = f"the baseline run again differs by {percent(noise.value):+.4f}%"
        yield clustered("ppl_aa_pct", _in_percent(noise), scored)
    differences = _differences(chunks, native)
    if interval := stats.clustered_bootstrap(*differences):
        low, high = map(percent, interval)
        note = f"a bootstrap over documents gives [{low:+.4g}, {high:+.4g}]%"
    change = _in_percent(clustered_ratio(*differences))
    yield clustered("ppl_delta_pct", change, scored, joined(floor, note))


def _differences(
    chunks: Sequence[Chunk], native: Sequence[Chunk]
) -> tuple[list[float], list[int], list[Any]]:
    """Difference of NLL, scored tokens and document of each chunk."""
    return (
        [a["nll"] - b["nll"] for a, b in zip(chunks, native, strict=True)],
        [chunk["tokens"] for chunk in chunks],
        [chunk["document"] for chunk in chunks],
    )


def _in_percent(change: Estimate) -> Estimate:
    interval = change.interval and (percent(change.interval[0]), percent(change.interval[1]))
    return replace(change, value=percent(change.value), interval=interval)


def _by_position(record: Record, baseline: Record | None) -> Iterator[Value]:
    """Perplexity and its change, separately for early and late tokens of a chunk."""
    chunks, edges = record.samples["chunks"], record.facts.get("positions")
    if not edges or not all("by_position" in chunk for chunk in chunks):
        return
    native = baseline.samples["chunks"] if baseline else ()
    paired = (
        baseline is not None
        and not incomparable(record, baseline, (*COMPARABLE, "positions"))
        and _layout(chunks) == _layout(native)
        and all("by_position" in chunk for chunk in native)
    )
    for bucket, (low, high) in enumerate(pairwise(edges)):
        name, own = f"{low}_{high - 1}", [chunk["by_position"][bucket] for chunk in chunks]
        scored = sum(tokens for tokens, _ in own)
        if not scored:
            continue
        yield Value(f"ppl_at_{name}", exp(math.fsum(nll for _, nll in own) / scored), scored)
        if paired:
            other = [chunk["by_position"][bucket] for chunk in native]
            kept = [i for i, (tokens, _) in enumerate(own) if tokens]
            differences = [own[i][1] - other[i][1] for i in kept]
            documents = [chunks[i]["document"] for i in kept]
            change = clustered_ratio(differences, [own[i][0] for i in kept], documents)
            yield clustered(f"ppl_delta_pct_at_{name}", _in_percent(change), scored)


def _divergence(samples: Mapping[str, Any]) -> Iterator[Value]:
    """Values from all tokens: those in the record where it holds them all, else the runner's own sums and
    quantiles. Intervals are over documents: of sums by chunk, of quantiles from the tokens it keeps."""
    kept, whole = samples.get("kld_tokens"), samples.get("kld")
    if not kept:
        return
    n, chunks = whole["n"] if whole else len(kept), samples["chunks"]
    found: Mapping[str, float] = whole if whole and n > len(kept) else _summary(kept)
    owners = _owners(chunks, kept, n)
    if n > len(kept):
        mean = _by_chunk(clustered_mean, chunks, "kld", found["mean"])
    else:
        mean = clustered_mean(kept, [1.0] * n, owners)
    yield clustered("kld_mean", mean, n, value=found["mean"])
    for name, level in _QUANTILES.items():
        yield clustered(f"kld_{name}", stats.clustered_quantile(kept, level, owners), n, value=found[name])
    yield Value("kld_max", found["max"], n, note="the largest of these tokens; no interval")
    equal = samples.get("top1_equal")
    if equal is not None:
        yield clustered(
            "top1_agreement", _by_chunk(stats.clustered_share, chunks, "top1_equal", equal / n), n
        )
    if delta_p := samples.get("delta_p"):
        p = samples["delta_p_mean"] if n > len(delta_p) else fmean(delta_p)
        change = _by_chunk(clustered_ratio, chunks, "delta_p", p)
        points = change.interval and (100 * change.interval[0], 100 * change.interval[1])
        yield clustered("delta_p_mean", replace(change, value=100 * p, interval=points), n)


def _owners(chunks: Sequence[Chunk], kept: Sequence[float], n: int) -> list[Any]:
    """The document of each kept token; one for all where the record does not say of which chunks."""
    counts = [chunk.get("kept", chunk["tokens"] if n == len(kept) else 0) for chunk in chunks]
    owners = [chunk["document"] for chunk, count in zip(chunks, counts, strict=True) for _ in range(count)]
    return owners if len(owners) == len(kept) else [None] * len(kept)


def _by_chunk(
    estimate: Callable[[Sequence[float], Sequence[float], Sequence[Any]], Estimate],
    chunks: Sequence[Chunk],
    key: str,
    value: float,
) -> Estimate:
    """`estimate` over the chunks' sums under `key`; without an interval where an old record has none."""
    if not all(key in chunk for chunk in chunks):
        return Estimate(value, None, 1)
    return estimate([c[key] for c in chunks], [c["tokens"] for c in chunks], [c["document"] for c in chunks])


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def _summary(kld: Sequence[float]) -> dict[str, float]:
    quantiles = {name: stats.quantile(kld, level) for name, level in _QUANTILES.items()}
    return {**quantiles, "mean": fmean(kld), "p50": stats.median(kld), "max": stats.largest(kld)}


def _layout(chunks: Sequence[Chunk]) -> list[tuple[int, Any]]:
    """(scored tokens, document) of each chunk."""
    return [(chunk["tokens"], chunk["document"]) for chunk in chunks]


def _nll_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable:
    common = _common(first.record, second.record)
    if isinstance(common, str):
        return Unable(metric.name, common)
    a, b, tokens, owners, subset = common
    logs = clustered_ratio([y["nll"] - x["nll"] for x, y in zip(a, b, strict=True)], tokens, owners)
    return log_change(
        metric, TEXT, logs, sum(tokens), "tokens", _method(logs), subset=subset, identical=same(a, b, "nll")
    )


def _kld_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable | None:
    """Sum of KLD over sum of KLD; the wider interval of the two directions counts."""
    common = _common(first.record, second.record)
    if isinstance(common, str) or not all("kld" in c for c in (*common.first, *common.second)):
        return None
    a, b, tokens, owners, subset = common
    n, here, there = sum(tokens), [c["kld"] for c in a], [c["kld"] for c in b]
    if not (math.fsum(here) > 0 and math.fsum(there) > 0):
        if here != there:
            return Unable(metric.name, "nothing diverges in one of the two runs, so there is no ratio")
        none = Estimate(0.0, (0.0, 0.0), len(set(owners)))
        return log_change(metric, DIVERGENCE, none, n, "tokens", "no divergence in either", identical=True)
    ratio, inverse = clustered_mean(there, here, owners), clustered_mean(here, there, owners)
    value = math.log(ratio.value) if ratio.value > 0 else math.nan
    halves = [
        (math.log(found.interval[1]) - math.log(found.interval[0])) / 2
        for found in (ratio, inverse)
        if found.interval and found.interval[0] > 0
    ]
    interval = (value - max(halves), value + max(halves)) if len(halves) == 2 else None
    logs = Estimate(value, interval, ratio.units, min(ratio.effective, inverse.effective))
    return log_change(
        metric, DIVERGENCE, logs, n, "tokens", _method(logs), subset=subset, identical=same(a, b, "kld")
    )


def _top1_change(metric: Metric, first: Measured, second: Measured) -> Effect | None:
    common = _common(first.record, second.record)
    if isinstance(common, str) or not all("kld" in c for c in (*common.first, *common.second)):
        return None
    a, b, tokens, owners, subset = common
    flags = [y["top1_equal"] - x["top1_equal"] for x, y in zip(a, b, strict=True)]
    identical = same(a, b, "nll") and same(a, b, "kld")
    return share_change(metric, flags, tokens, owners, subset=subset, identical=identical)


class _Common(NamedTuple):
    """Chunks that both runs scored. subset: which those are, where one run has more."""

    first: list[Chunk]
    second: list[Chunk]
    tokens: list[int]
    owners: list[Any]
    subset: str


def _common(first: Record, second: Record) -> _Common | str:
    """The chunks that both runs scored, or why there are none."""
    sides = [dict(zip(_places(r), r.samples["chunks"], strict=True)) for r in (first, second)]
    places = sorted(sides[0].keys() & sides[1].keys())
    a, b = ([side[place] for place in places] for side in sides)
    if not places:
        return "the two runs scored no chunk in common"
    if _layout(a) != _layout(b):
        return "the chunks do not score the same tokens"
    most = max(map(len, sides))
    subset = f"{len(places)} chunks that both scored, of {most}" if len(places) < most else ""
    return _Common(a, b, [c["tokens"] for c in a], [c["document"] for c in a], subset)


def _places(record: Record) -> Sequence[int]:
    """Index of each scored chunk in the whole text; in older records, a limit spread n chunks evenly."""
    if (places := record.facts.get("chunk_places")) is not None:
        return [int(place) for place in places]
    n = len(record.samples["chunks"])
    return evenly(record.facts.get("chunks_total") or n, n)


def _method(found: Estimate) -> str:
    return f"chunk by chunk, {found.units} document{'s' if found.units != 1 else ''}"


FACTS: tuple[str, ...] = tuple(fact for fact in COMPARABLE if fact != "scored")
TABLES: tuple[Table, ...] = (
    Table("quality", "Quality", counted="tokens",
          note="KLD is measured from the native next-token distribution to the candidate's, over the whole "
               "vocabulary. The perplexity delta is a paired log-ratio. Intervals are clustered by "
               "document. The baseline run again is the noise floor.",
          metrics=(
        Metric("ppl", PERPLEXITY, "lower", "Perplexity",
               "exp(sum of NLL / scored tokens), never a mean of means", brief=True, effect=_nll_change),
        Metric("ppl_delta_pct", PERCENT, "", "Perplexity delta",
               "(exp(d) - 1) * 100, d the mean NLL difference from the baseline over the same scored "
               "tokens; t-interval clustered by document",
               plausible=(-99.0, inf), paired=True, sampled=True, none=0.0, brief=True),
        Metric("ppl_aa_pct", PERCENT, "", "Baseline run again",
               "ppl_delta_pct of the baseline run again next to the candidate: the noise floor",
               plausible=(-99.0, inf), paired=True, sampled=True, none=0.0),
        Metric("kld_mean", NAT, "lower", "KLD mean",
               "mean KL divergence of the candidate's next-token distribution from the native one, full "
               "vocabulary; intervals of it and of its quantiles are clustered by document",
               paired=True, sampled=True, none=0.0, brief=True, effect=_kld_change),
        *(Metric(f"kld_{name}", NAT, "lower", f"KLD p{level}",
                 f"{level}th percentile of the KL divergence per token",
                 paired=True, sampled=True, none=0.0, brief=name == "p99")
          for name, level in (("p50", "50"), ("p90", "90"), ("p99", "99"), ("p999", "99.9"))),
        Metric("kld_max", NAT, "lower", "KLD max",
               "largest KL divergence of a token", paired=True),
        Metric("top1_agreement", SHARE, "higher", "Top-1 agreement",
               "share of scored tokens where candidate and native have the same most likely token; Wilson "
               "interval of the effective number of independent tokens",
               paired=True, sampled=True, none=1.0, brief=True, effect=_top1_change),
        Metric("delta_p_mean", POINTS, "", "Delta-p mean",
               "mean change of the probability of the true token, in percentage points",
               paired=True, sampled=True, none=0.0),
    )),
    Table("positions", "Perplexity by position", counted="tokens", facts=False,
          note="Scored tokens by their position in the chunk. A token at 300 attends to 300 stored tokens, "
               "a token at 10 to ten: an error that builds up over a context shows as deltas that grow to "
               "the right.",
          metrics=(
        *(metric for low, high in pairwise((0, 64, 128, 256, 512)) for metric in (
            Metric(f"ppl_at_{low}_{high - 1}", PERPLEXITY, "lower", f"At {low}-{high - 1}",
                   f"ppl of the scored tokens at positions {low} to {high - 1} of their chunk"),
            Metric(f"ppl_delta_pct_at_{low}_{high - 1}", PERCENT, "", f"Delta {low}-{high - 1}",
                   f"ppl_delta_pct of the scored tokens at positions {low} to {high - 1} of their chunk",
                   plausible=(-99.0, inf), paired=True, brief=low in (0, 256)),
        )),
    )),
)  # fmt: skip
