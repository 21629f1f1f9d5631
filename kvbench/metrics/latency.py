"""TTFT and ITL as serving benchmarks define them (ITL is the gap between tokens of one sequence, without TTFT),
rates, and ratios over interleaved pairs of requests (A B B A).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Any

from kvbench.metrics.value import Value, with_interval
from kvbench.records.record import Record
from kvbench.stats import stability as steadiness
from kvbench.stats.intervals import largest, median, paired_ratio, quantile
from kvbench.stats.rates import decode_tok_s, prefill_tok_s

Arm = Mapping[str, Any]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    """The ratios come from this record's own arms (A B B A in one process), not from the baseline's record."""
    arms = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    own = [arm for arm in arms if arm["arm"] == "candidate"]
    other = [arm for arm in arms if arm["arm"] == "baseline"]
    if own:
        yield from _absolute(own)
        yield from _totals(own)
        yield from _bandwidth(own, record.facts)
        yield from _steadiness(arms, own)
    cold = [arm["ttft_ms"] for arm in record.samples.get("warmup", []) if arm["arm"] == "candidate"]
    if cold:
        yield Value("ttft_cold_ms", cold[0], 1)
    else:
        yield Value("ttft_cold_ms", None, 0, note="no warm-up request was made")
    if own and other:
        yield from _ratios(own, other)


def _absolute(arms: Sequence[Arm]) -> Iterator[Value]:
    ttft = median(arm["ttft_ms"] for arm in arms)
    yield Value("ttft_ms", ttft, len(arms))
    first = arms[0]
    yield Value("prefill_tok_s", prefill_tok_s(first["prefill_tokens"], ttft / 1e3), len(arms))

    gaps = [gap for arm in arms for gap in arm["itl_ms"]]
    note = wrong_count(arms) or ("" if gaps else "one output token has no gap")
    n = len(gaps)
    yield Value("itl_ms", None if note else fmean(gaps), n, note=note)
    yield Value("itl_p50_ms", None if note else median(gaps), n, note=note)
    yield Value("itl_p90_ms", None if note else quantile(gaps, 0.9), n, note=note)
    yield Value("itl_p99_ms", None if note else quantile(gaps, 0.99), n, note=note)
    yield Value("itl_max_ms", None if note else largest(gaps), n, note=note)
    rate = None if note else decode_tok_s(first["batch"], [gap / 1e3 for gap in gaps])
    yield Value("decode_tok_s", rate, n, note=note)


def _totals(arms: Sequence[Arm]) -> Iterator[Value]:
    """A request's time by the first and the last look at the clock, and what its parts miss of it."""
    if not all("total_ms" in arm for arm in arms):
        for metric in ("request_ms", "request_difference_ms"):
            yield Value(metric, None, 0, note="the record holds no time of a whole request")
        return
    yield Value("request_ms", median(arm["total_ms"] for arm in arms), len(arms))
    parts = [arm["ttft_ms"] + fsum(arm["itl_ms"]) for arm in arms]
    off = [abs(arm["total_ms"] - part) for arm, part in zip(arms, parts, strict=True)]
    worst = max(range(len(arms)), key=lambda i: (off[i] != off[i], off[i]))
    note = (
        f"request {arms[worst]['order']} took {arms[worst]['total_ms']:.6g} ms, and its TTFT and {len(arms[worst]['itl_ms'])} "
        f"steps add up to {parts[worst]:.6g} ms"
        if off[worst] != 0
        else ""
    )
    yield Value("request_difference_ms", largest(off), len(arms), note=note)


def _steadiness(arms: Sequence[Arm], own: Sequence[Arm]) -> Iterator[Value]:
    """How still the machine held; `kvbench.gate.latency_validity` judges by the same functions."""
    drift = steadiness.drift(arms)
    if isinstance(drift, str):
        yield Value("latency_drift_pct", None, len(arms), note=drift)
    else:
        low, high = drift.interval
        yield Value("latency_drift_pct", drift.pct, len(arms), low, high, units=drift.degrees + 1)
    yield _outliers(arms)
    yield _stalls(arms, own)
    yield _throttled(arms)


def _outliers(arms: Sequence[Arm]) -> Value:
    places = {arm["order"]: arm["arm"] for arm in arms}
    said: dict[int, list[str]] = {}
    for quantity, name in (("ttft", "TTFT"), ("itl", "ITL")):
        if quantity == "itl" and not any(arm["itl_ms"] for arm in arms):
            continue
        found = steadiness.outliers(arms, quantity)
        if isinstance(found, str):
            return Value("latency_outliers", None, len(arms), note=found)
        for order, times in found.items():
            said.setdefault(order, []).append(f"{name} {times:.3g}x")
    note = ", ".join(f"{order} ({places[order]}, {' and '.join(said[order])})" for order in sorted(said))
    return Value("latency_outliers", len(said), len(arms), note=f"request {note}" if note else "")


def _stalls(arms: Sequence[Arm], own: Sequence[Arm]) -> Value:
    counts = [steadiness.stalls(arm) for arm in own]
    found = [n for n in counts if n is not None]
    if len(found) < len(counts):
        note = f"a stall is told from {steadiness.LEAST_FOR_STALLS} steps a request on"
        return Value("itl_outlier_share", None, 0, note=note)
    other = [n for arm in arms if arm["arm"] == "baseline" and (n := steadiness.stalls(arm)) is not None]
    note = f"{sum(found)} here" + (f", {sum(other)} of the baseline's" if other else "")
    steps = sum(len(arm["itl_ms"]) for arm in own)
    return Value("itl_outlier_share", sum(found) / steps, steps, note=note)


def _throttled(arms: Sequence[Arm]) -> Value:
    words = [steadiness.slowdown(arm) for arm in arms]
    known = sum(found is not None for found in words)
    if not known:
        return Value(
            "throttled_requests",
            None,
            0,
            note="the device's state was not read, or says nothing of a slowdown",
        )
    unread = f"{len(arms) - known} of {len(arms)} requests say nothing of it" if known < len(arms) else ""
    slowed = steadiness.slowed(arms)
    if not slowed and unread:
        return Value("throttled_requests", None, known, note=unread)
    note = "; ".join(filter(None, (steadiness.slowdown_text(arms), unread)))
    return Value("throttled_requests", len(slowed), known, note=note)


def _bandwidth(arms: Sequence[Arm], facts: Mapping[str, Any]) -> Iterator[Value]:
    """Bytes that a step must read over the mean gap, and of the device's copy bandwidth what lies beyond its cache."""
    gaps = [gap for arm in arms for gap in arm["itl_ms"]]
    reads = facts.get("arms", {}).get("candidate", {}).get("reads")
    note = wrong_count(arms) or ("" if gaps else "one output token has no gap")
    if reads is None:
        note = note or "the record does not say what a step reads"
    if note or reads is None:
        yield Value("decode_read_gb_s", None, len(gaps), note=note)
        yield Value("decode_bandwidth_share", None, len(gaps), note=note)
        return
    seconds, bytes_ = fmean(gaps) / 1e3, sum(step_bytes(arms[0], reads))
    yield Value("decode_read_gb_s", bytes_ / seconds / 1e9, len(gaps))
    copy, cache = facts.get("copy_gb_s"), facts.get("cache_bytes") or 0
    if copy is None:
        reason = facts.get("copy_reason") or "it is not in the record"
        yield Value("decode_bandwidth_share", None, len(gaps), note=f"copy bandwidth is not known: {reason}")
    elif bytes_ <= cache:
        yield Value(
            "decode_bandwidth_share",
            None,
            len(gaps),
            note=f"the {bytes_:,.0f} B of a step fit the cache of {cache:,} B",
        )
    else:
        share = (bytes_ - cache) / seconds / 1e9 / copy
        note = f"{bytes_:,.0f} B a step, of which {cache:,} B may be cached, in {seconds * 1e3:.4g} ms; a copy runs at {copy:.4g} GB/s"
        yield Value("decode_bandwidth_share", share, len(gaps), note=note)


def step_bytes(arm: Arm, reads: Mapping[str, Any]) -> tuple[float, float]:
    """(of the weights, of the cache): bytes that a decode step of this request must read, in the mean over its steps."""
    stored = arm["prefill_tokens"] + arm["batch"] * (arm["new_tokens"] / 2 - 1)
    return reads["weight_bytes"], reads["kv_bytes_per_token"] * stored


def _ratios(own: Sequence[Arm], other: Sequence[Arm]) -> Iterator[Value]:
    """The k-th candidate repeat is paired with the k-th baseline repeat, its neighbour in A B B A."""
    pairs = min(len(own), len(other))
    note = (
        ""
        if len(own) == len(other)
        else f"{len(own)} repeats here, {len(other)} of the baseline: {pairs} pairs"
    )
    own, other = own[:pairs], other[:pairs]
    ratio = paired_ratio([arm["ttft_ms"] for arm in own], [arm["ttft_ms"] for arm in other])
    yield with_interval("ttft_ratio", ratio.value, ratio.units, ratio.interval, note)
    if not all(arm["itl_ms"] for arm in (*own, *other)):
        yield Value("itl_ratio", None, 0, note="one output token has no gap")
        return
    ratio = paired_ratio([fmean(arm["itl_ms"]) for arm in own], [fmean(arm["itl_ms"]) for arm in other])
    yield with_interval("itl_ratio", ratio.value, ratio.units, ratio.interval, note)


def wrong_count(arms: Sequence[Arm]) -> str:
    """N output tokens have N - 1 gaps; any other count means that TTFT or a chunk was taken for a token gap."""
    for arm in arms:
        if len(arm["itl_ms"]) != arm["new_tokens"] - 1:
            return f"{arm['new_tokens']} output tokens have {arm['new_tokens'] - 1} gaps, but {len(arm['itl_ms'])} were recorded"
    return ""
