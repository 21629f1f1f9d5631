"""Perplexity is exp of the mean NLL. `stream512`: the text is tokenized once and cut into chunks of 512, the
first token of a chunk is not scored. `rows512`: the same within each row. `llamacpp`: the second half of each chunk
is scored, as in llama.cpp. KLD is from the native distribution to the candidate's, over the full vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from kvbench.metrics.value import Value, clustered, incomparable
from kvbench.records.record import Record
from kvbench.stats.intervals import (
    Estimate,
    clustered_bootstrap,
    clustered_mean,
    clustered_quantile,
    clustered_ratio,
    clustered_share,
    exp,
    largest,
    median,
    quantile,
)

# What must be equal before two perplexities may be set against each other: the protocol is part of the number.
COMPARABLE = (
    "protocol",
    "split",
    "bos",
    "text",
    "text_cut",
    "chunk",
    "stride",
    "tokens",
    "scored",
    "data_sha",
)

Chunk = Mapping[str, Any]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    chunks = record.samples["chunks"]
    scored = sum(chunk["tokens"] for chunk in chunks)
    if scored != record.facts["scored"]:
        note = f"the record says {record.facts['scored']} scored tokens, its chunks hold {scored}"
        yield Value("ppl", None, scored, note=note)
    elif scored == 0:
        yield Value("ppl", None, 0, note="no token was scored")
    else:
        yield Value("ppl", exp(_total(chunks) / scored), scored)
        if baseline:
            yield from _deltas(record, baseline, scored)
        yield from _by_position(record, baseline)
    yield from _divergence(record.samples)


def _deltas(record: Record, baseline: Record, scored: int) -> Iterator[Value]:
    """The candidate's change, and beside it that of the baseline run again: the noise floor."""
    chunks, native = record.samples["chunks"], baseline.samples["chunks"]
    note = incomparable(record, baseline, COMPARABLE)
    if not note and _layout(chunks) != _layout(native):
        note = "not comparable with the baseline: the chunks do not score the same tokens"
    if note:
        yield Value("ppl_delta_pct", None, scored, note=note)
        return
    again = record.samples.get("native_chunks")
    floor = ""
    if again and _layout(again) == _layout(native):
        noise = _change(again, native)
        floor = f"the baseline run again differs by {_percent(noise.value):+.4f}%"
        yield clustered("ppl_aa_pct", _as_percent(noise), scored)
    note = "; ".join(filter(None, (floor, _bootstrapped(chunks, native))))
    yield clustered("ppl_delta_pct", _as_percent(_change(chunks, native)), scored, note)


def _change(chunks: Sequence[Chunk], native: Sequence[Chunk]) -> Estimate:
    """Mean difference of NLL a token, with its t-interval over documents."""
    return clustered_ratio(*_paired(chunks, native))


def _bootstrapped(chunks: Sequence[Chunk], native: Sequence[Chunk]) -> str:
    """The same change by a bootstrap over documents, for comparison with tools that have one; "" where there are too few."""
    interval = clustered_bootstrap(*_paired(chunks, native))
    if interval is None:
        return ""
    low, high = map(_percent, interval)
    return f"a bootstrap over documents gives [{low:+.4g}, {high:+.4g}]%"


def _paired(chunks: Sequence[Chunk], native: Sequence[Chunk]) -> tuple[list[float], list[int], list[Any]]:
    """Difference of NLL, scored tokens and document of each chunk."""
    return (
        [a["nll"] - b["nll"] for a, b in zip(chunks, native, strict=True)],
        [chunk["tokens"] for chunk in chunks],
        [chunk["document"] for chunk in chunks],
    )


def _as_percent(change: Estimate) -> Estimate:
    interval = change.interval and (_percent(change.interval[0]), _percent(change.interval[1]))
    return replace(change, value=_percent(change.value), interval=interval)


def _by_position(record: Record, baseline: Record | None) -> Iterator[Value]:
    """Perplexity and its change apart for early and late tokens of a chunk, which attend to few and to many stored ones."""
    chunks, edges = record.samples["chunks"], record.facts.get("positions")
    if not edges or not all("by_position" in chunk for chunk in chunks):
        return
    native = baseline.samples["chunks"] if baseline else ()
    paired = (
        bool(native)
        and baseline is not None
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
        if not paired:
            continue
        beside = [chunk["by_position"][bucket] for chunk in native]
        kept = [i for i, (tokens, _) in enumerate(own) if tokens]
        change = clustered_ratio(
            [own[i][1] - beside[i][1] for i in kept],
            [own[i][0] for i in kept],
            [chunks[i]["document"] for i in kept],
        )
        yield clustered(f"ppl_delta_pct_at_{name}", _as_percent(change), scored)


def _divergence(samples: Mapping[str, Any]) -> Iterator[Value]:
    """Values from all tokens: those in the record where it holds them all, else the runner's own sums and quantiles.

    Intervals are over documents. Of the sums and counts of each chunk where the record has them; of quantiles from the
    tokens it keeps. A largest value has none: what lies beyond the largest sample no sample says.
    """
    kept, whole = samples.get("kld_tokens"), samples.get("kld")
    if not kept:
        return
    n = whole["n"] if whole else len(kept)
    found: Mapping[str, float] = whole if whole and n > len(kept) else _summary(kept)
    chunks = samples["chunks"]
    owners = _owners(chunks, kept, n)
    if n > len(kept):
        mean = _by_chunk(clustered_mean, chunks, "kld", found["mean"])
    else:
        mean = clustered_mean(kept, [1.0] * n, owners)
    yield clustered("kld_mean", mean, n, value=found["mean"])
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        yield clustered(f"kld_{name}", clustered_quantile(kept, level, owners), n, value=found[name])
    yield Value("kld_max", found["max"], n, note="the largest of these tokens; no interval")
    equal = samples.get("top1_equal")
    if equal is not None:
        yield clustered("top1_agreement", _by_chunk(clustered_share, chunks, "top1_equal", equal / n), n)
    if samples.get("delta_p"):
        sampled = n > len(samples["delta_p"])
        p = samples["delta_p_mean"] if sampled else fmean(samples["delta_p"])
        change = _by_chunk(clustered_ratio, chunks, "delta_p", p)
        points = change.interval and (100 * change.interval[0], 100 * change.interval[1])
        yield clustered("delta_p_mean", replace(change, value=100 * p, interval=points), n)


def _owners(chunks: Sequence[Chunk], kept: Sequence[float], n: int) -> list[Any]:
    """The document of each kept token; one for all where the record does not say (it kept a sample, and not of which)."""
    counts = [chunk.get("kept", chunk["tokens"] if n == len(kept) else 0) for chunk in chunks]
    owners = [chunk["document"] for chunk, count in zip(chunks, counts, strict=True) for _ in range(count)]
    return owners if len(owners) == len(kept) else [None] * len(kept)


def _by_chunk(
    estimate: Callable[[Sequence[float], Sequence[float], Sequence[Any]], Estimate],
    chunks: Sequence[Chunk],
    key: str,
    value: float,
) -> Estimate:
    """`estimate` over the chunks' sums under `key`; without an interval where an old record has none of them."""
    if not all(key in chunk for chunk in chunks):
        return Estimate(value, None, 1)
    return estimate([c[key] for c in chunks], [c["tokens"] for c in chunks], [c["document"] for c in chunks])


def _summary(kld: Sequence[float]) -> dict[str, float]:
    quantiles = {"p90": quantile(kld, 0.9), "p99": quantile(kld, 0.99), "p999": quantile(kld, 0.999)}
    return {"mean": fmean(kld), "p50": median(kld), **quantiles, "max": largest(kld)}


def _total(chunks: Sequence[Chunk]) -> float:
    return math.fsum(chunk["nll"] for chunk in chunks)


def _layout(chunks: Sequence[Chunk]) -> list[tuple[int, Any]]:
    """What each chunk scores: (scored tokens, document)."""
    return [(chunk["tokens"], chunk["document"]) for chunk in chunks]


def _percent(log_ratio: float) -> float:
    return (exp(log_ratio) - 1) * 100
