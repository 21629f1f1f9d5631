"""Perplexity, its paired change, and the divergence of next-token distributions, from sums a chunk and values a token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from kvbench.derive.value import Value, incomparable, share, with_interval
from kvbench.record import Record
from kvbench.stats import clustered_ratio, exp, largest, median, quantile

# What must be equal before two perplexities may be set against each other: the protocol is part of the number.
COMPARABLE = ("protocol", "split", "bos", "text", "chunk", "tokens", "scored", "data_sha")

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
            yield _delta(record, baseline, scored)
        yield from _by_position(record, baseline)
    yield from _divergence(record.samples)


def _delta(record: Record, baseline: Record, scored: int) -> Value:
    chunks, native = record.samples["chunks"], baseline.samples["chunks"]
    note = incomparable(record, baseline, COMPARABLE)
    if not note and _layout(chunks) != _layout(native):
        note = "not comparable with the baseline: the chunks do not score the same tokens"
    if note:
        return Value("ppl_delta_pct", None, scored, note=note)
    change = clustered_ratio(
        [a["nll"] - b["nll"] for a, b in zip(chunks, native, strict=True)],
        [chunk["tokens"] for chunk in chunks],
        [chunk["document"] for chunk in chunks],
    )
    notes = [f"{change.units} documents" if change.interval else "1 document: no interval"]
    again = record.samples.get("native_chunks")
    if again and _layout(again) == _layout(native):
        floor = _percent((_total(again) - _total(native)) / scored)
        notes.append(f"the baseline run again differs by {floor:+.4f}%")
    interval = change.interval and (_percent(change.interval[0]), _percent(change.interval[1]))
    return with_interval("ppl_delta_pct", _percent(change.value), scored, interval, "; ".join(notes))


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
        interval = change.interval and (_percent(change.interval[0]), _percent(change.interval[1]))
        yield with_interval(f"ppl_delta_pct_at_{name}", _percent(change.value), scored, interval, "")


def _divergence(samples: Mapping[str, Any]) -> Iterator[Value]:
    """From the values a token where the record holds all of them, else from the sums the runner took over all."""
    kept, whole = samples.get("kld_tokens"), samples.get("kld")
    if not kept:
        return
    n = whole["n"] if whole else len(kept)
    found: Mapping[str, float] = whole if whole and n > len(kept) else _summary(kept)
    for name in ("mean", "p50", "p90", "p99", "p999", "max"):
        yield Value(f"kld_{name}", found[name], n)
    if samples.get("top1_equal") is not None:
        yield share("top1_agreement", samples["top1_equal"], n)
    if samples.get("delta_p"):
        sampled = n > len(samples["delta_p"])
        yield Value(
            "delta_p_mean", 100 * (samples["delta_p_mean"] if sampled else fmean(samples["delta_p"])), n
        )


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
