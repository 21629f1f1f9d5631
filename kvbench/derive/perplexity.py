"""Perplexity, its paired change, and the divergence of next-token distributions, from sums a chunk and values a token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
