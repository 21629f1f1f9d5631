"""TTFT and ITL as serving benchmarks define them, rates, and ratios over interleaved requests (A B B A)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any

from kvbench.metrics import contexts
from kvbench.metrics.declare.change import independent_change, log_change
from kvbench.metrics.declare.metric import BESIDE, Effect, Measured, Metric, Table, Unable
from kvbench.metrics.declare.units import GB_PER_S, MS, PERCENT, RATIO, REQUESTS, SHARE, TOKENS_PER_S
from kvbench.metrics.declare.value import Value, joined, unmeasured, with_interval
from kvbench.records.record import Record
from kvbench.stats import stability
from kvbench.stats.intervals import independent_difference, largest, median, paired_ratio, quantile
from kvbench.stats.latency import decode_tok_s, prefill_tok_s, wrong_gap_count

Arm = Mapping[str, Any]

NO_GAP = "one output token has no gap"


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    """The ratios come from this record's own arms (A B B A in one process), not the baseline's record."""
    arms = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    own = [arm for arm in arms if arm["arm"] == "candidate"]
    other = [arm for arm in arms if arm["arm"] == "baseline"]
    if own:
        yield from _absolute(own)
        yield from _totals(own)
        yield from _bandwidth(own, record.facts)
        yield from _stability(arms, own)
    cold = [arm["ttft_ms"] for arm in record.samples.get("warmup", []) if arm["arm"] == "candidate"]
    none = Value("ttft_cold_ms", None, 0, note="no warm-up request")
    yield Value("ttft_cold_ms", cold[0], 1) if cold else none
    if own and other:
        yield from _ratios(own, other)


def _absolute(arms: Sequence[Arm]) -> Iterator[Value]:
    ttft, first = median(arm["ttft_ms"] for arm in arms), arms[0]
    yield Value("ttft_ms", ttft, len(arms))
    yield Value("prefill_tok_s", prefill_tok_s(first["prefill_tokens"], ttft / 1e3), len(arms))
    gaps, problem = _gaps(arms)
    n = len(gaps)
    if problem:
        names = ("itl_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "itl_max_ms", "decode_tok_s")
        yield from unmeasured(names, problem, n)
        return
    yield Value("itl_ms", fmean(gaps), n)
    yield Value("itl_p50_ms", median(gaps), n)
    yield Value("itl_p90_ms", quantile(gaps, 0.9), n)
    yield Value("itl_p99_ms", quantile(gaps, 0.99), n)
    yield Value("itl_max_ms", largest(gaps), n)
    yield Value("decode_tok_s", decode_tok_s(first["batch"], [gap / 1e3 for gap in gaps]), n)


def _gaps(arms: Sequence[Arm]) -> tuple[list[float], str]:
    """All gaps in ms, and why they are not usable, or ""."""
    gaps = [gap for arm in arms for gap in arm["itl_ms"]]
    return gaps, wrong_gap_count(arms) or ("" if gaps else NO_GAP)


def _totals(arms: Sequence[Arm]) -> Iterator[Value]:
    """A request's time by two clock readings, and its difference from the sum of its parts."""
    if not all("total_ms" in arm for arm in arms):
        names = ("request_ms", "request_difference_ms")
        yield from unmeasured(names, "the record holds no time of a whole request", 0)
        return
    yield Value("request_ms", median(arm["total_ms"] for arm in arms), len(arms))
    parts = [arm["ttft_ms"] + math.fsum(arm["itl_ms"]) for arm in arms]
    off = [abs(arm["total_ms"] - part) for arm, part in zip(arms, parts, strict=True)]
    at = max(range(len(arms)), key=lambda i: (off[i] != off[i], off[i]))
    worst = arms[at]
    note = (
        f"request {worst['order']} took {worst['total_ms']:.6g} ms, but its TTFT and "
        f"{len(worst['itl_ms'])} steps add up to {parts[at]:.6g} ms"
    )
    yield Value("request_difference_ms", largest(off), len(arms), note=note if off[at] != 0 else "")


def _stability(arms: Sequence[Arm], own: Sequence[Arm]) -> Iterator[Value]:
    """How stable the machine was; `kvbench.gate.latency_validity` judges by the same functions."""
    drift = stability.drift(arms)
    if isinstance(drift, str):
        yield Value("latency_drift_pct", None, len(arms), note=drift)
    else:
        yield Value("latency_drift_pct", drift.pct, len(arms), *drift.interval, units=drift.degrees + 1)
    yield _outliers(arms)
    yield _stalls(arms, own)
    yield _throttled(arms)


def _outliers(arms: Sequence[Arm]) -> Value:
    names = {arm["order"]: arm["arm"] for arm in arms}
    by_request: dict[int, list[str]] = {}
    for quantity, label in (("ttft", "TTFT"), ("itl", "ITL")):
        if quantity == "itl" and not any(arm["itl_ms"] for arm in arms):
            continue
        found = stability.outliers(arms, quantity)
        if isinstance(found, str):
            return Value("latency_outliers", None, len(arms), note=found)
        for order, times in found.items():
            by_request.setdefault(order, []).append(f"{label} {times:.3g}x")
    note = ", ".join(f"{i} ({names[i]}, {' and '.join(by_request[i])})" for i in sorted(by_request))
    return Value("latency_outliers", len(by_request), len(arms), note=f"request {note}" if note else "")


def _stalls(arms: Sequence[Arm], own: Sequence[Arm]) -> Value:
    counts = [stability.stalls(arm) for arm in own]
    found = [n for n in counts if n is not None]
    if len(found) < len(counts):
        note = f"stalls need {stability.LEAST_FOR_STALLS} steps per request"
        return Value("itl_outlier_share", None, 0, note=note)
    other = [n for arm in arms if arm["arm"] == "baseline" and (n := stability.stalls(arm)) is not None]
    note = f"{sum(found)} here" + (f", {sum(other)} of the baseline's" if other else "")
    steps = sum(len(arm["itl_ms"]) for arm in own)
    return Value("itl_outlier_share", sum(found) / steps, steps, note=note)


def _throttled(arms: Sequence[Arm]) -> Value:
    known = sum(stability.slowdown(arm) is not None for arm in arms)
    if not known:
        note = "the device's state was not read or does not report slowdowns"
        return Value("throttled_requests", None, 0, note=note)
    unread = f"{len(arms) - known} of {len(arms)} requests have no device state" if known < len(arms) else ""
    slowed = stability.slowed(arms)
    note = joined(stability.slowdown_text(arms), unread)
    return Value("throttled_requests", len(slowed) if slowed or not unread else None, known, note=note)


def _bandwidth(arms: Sequence[Arm], facts: Mapping[str, Any]) -> Iterator[Value]:
    """Bytes that a step must read over the mean gap, and the part beyond the cache over copy bandwidth."""
    gaps, problem = _gaps(arms)
    n, reads = len(gaps), facts.get("arms", {}).get("candidate", {}).get("reads")
    if problem or reads is None:
        names = ("decode_read_gb_s", "decode_bandwidth_share")
        yield from unmeasured(names, problem or "the record does not say what a step reads", n)
        return
    seconds, bytes_ = fmean(gaps) / 1e3, sum(step_bytes(arms[0], reads))
    yield Value("decode_read_gb_s", bytes_ / seconds / 1e9, n)
    copy, cache, used = facts.get("copy_gb_s"), facts.get("cache_bytes") or 0, None
    if copy is None:
        note = f"copy bandwidth is not known: {facts.get('copy_reason') or 'it is not in the record'}"
    elif bytes_ <= cache:
        note = f"the {bytes_:,.0f} B of a step fit the cache of {cache:,} B"
    else:
        used = (bytes_ - cache) / seconds / 1e9 / copy
        note = f"{bytes_:,.0f} B per step, of which {cache:,} B may be cached, in {seconds * 1e3:.4g} ms"
        note += f"; a copy runs at {copy:.4g} GB/s"
    yield Value("decode_bandwidth_share", used, n, note=note)


def step_bytes(arm: Arm, reads: Mapping[str, Any]) -> tuple[float, float]:
    """(weights, cache): bytes that a decode step of this request must read, mean over its steps."""
    stored = arm["prefill_tokens"] + arm["batch"] * (arm["new_tokens"] / 2 - 1)
    return reads["weight_bytes"], reads["kv_bytes_per_token"] * stored


def _ratios(own: Sequence[Arm], other: Sequence[Arm]) -> Iterator[Value]:
    """The k-th candidate repeat is paired with the k-th baseline repeat, its neighbour in A B B A."""
    pairs = min(len(own), len(other))
    unequal = f"{len(own)} repeats here, {len(other)} of the baseline: {pairs} pairs"
    note = "" if len(own) == len(other) else unequal
    sides = own[:pairs], other[:pairs]
    ratio = paired_ratio(*([arm["ttft_ms"] for arm in side] for side in sides))
    yield with_interval("ttft_ratio", ratio.value, ratio.units, ratio.interval, note)
    if not all(arm["itl_ms"] for side in sides for arm in side):
        yield Value("itl_ratio", None, 0, note=NO_GAP)
        return
    ratio = paired_ratio(*([fmean(arm["itl_ms"]) for arm in side] for side in sides))
    yield with_interval("itl_ratio", ratio.value, ratio.units, ratio.interval, note)


def _time_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable:
    """Change of the ratio to the interleaved native arm; without native arms in both runs, of the times."""
    quantity = metric.name.removesuffix("_ms")
    here, there = (_log_times(side.record, quantity) for side in (first, second))
    if isinstance(here, str) or isinstance(there, str):
        return Unable(metric.name, here if isinstance(here, str) else str(there))
    (own, pairs), (other, others) = here, there
    alone = independent_change(metric, own, other, "requests")
    if not pairs or not others:
        return alone
    found = independent_difference(pairs, others)
    method = "ratio to the interleaved native arm, over that ratio in the first run"
    return log_change(metric, BESIDE, found, min(len(pairs), len(others)), "pairs", method, beside=alone)


def _log_times(record: Record, quantity: str) -> tuple[list[float], list[float]] | str:
    """Logarithms of the candidate's times and of their ratios to the baseline's; or why there are none."""
    ordered = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    if quantity == "itl" and (wrong := wrong_gap_count(ordered)):
        return wrong
    logs: dict[str, list[float]] = {"candidate": [], "baseline": []}
    for arm in ordered:
        time = stability.time_of(arm, quantity)
        if time is None:
            return NO_GAP
        if not 0 < time < inf:
            return "a time is not a positive number"
        logs[arm["arm"]].append(math.log(time))
    own, other = logs["candidate"], logs["baseline"]
    return (own, [a - b for a, b in zip(own, other, strict=False)]) if own else "no request was measured"


FACTS: tuple[str, ...] = ("prompt_sha",)
TABLES: tuple[Table, ...] = (
    Table("latency", "Latency", counted="pairs of requests",
          note="ITL is the gap between tokens of one sequence, TTFT the time to the first. Warm-up is only "
               "in the cold column. Ratios are paired with interleaved baseline requests; below 1 the "
               "candidate is faster. Drift, outliers and slowdowns show whether the machine was stable.",
          footnote="Ratios are paired with the baseline's requests that ran interleaved with the "
                   "candidate's; the native row above shows the requests of its own cell, so the two need "
                   "not agree.",
          metrics=(
        Metric("itl_ms", MS, "lower", "ITL mean",
               "mean gap between tokens of one sequence, without TTFT", brief=True, effect=_time_change),
        Metric("itl_ratio", RATIO, "lower", "ITL ratio",
               "mean ITL over the interleaved baseline's, geometric mean over pairs of repeats, t-interval "
               "of the log-ratio", plausible=(0.05, inf), paired=True, sampled=True, none=1.0, brief=True),
        Metric("ttft_ms", MS, "lower", "TTFT median",
               "request submitted to first token on the host, synchronised; median over repeats",
               brief=True, effect=_time_change),
        Metric("ttft_ratio", RATIO, "lower", "TTFT ratio",
               "TTFT over the interleaved baseline's, geometric mean over pairs of repeats, t-interval of "
               "the log-ratio", plausible=(0.05, inf), paired=True, sampled=True, none=1.0, brief=True),
        Metric("decode_tok_s", TOKENS_PER_S, "higher", "Decode",
               "batch * (N - 1) / sum of the N - 1 steps: the batch's rate", brief=True),
        Metric("prefill_tok_s", TOKENS_PER_S, "higher", "Prefill",
               "batch * prompt tokens of a sequence / TTFT"),
        Metric("itl_p50_ms", MS, "lower", "ITL p50",
               "median gap between consecutive tokens of one sequence"),
        Metric("itl_p90_ms", MS, "lower", "ITL p90",
               "90th percentile of the gaps, an observed gap (rounded up)"),
        Metric("itl_p99_ms", MS, "lower", "ITL p99",
               "99th percentile of the gaps, an observed gap (rounded up)"),
        Metric("itl_max_ms", MS, "lower", "ITL max", "longest gap"),
        Metric("ttft_cold_ms", MS, "lower", "TTFT cold",
               "TTFT of the first warm-up request: compilation and allocation included"),
        Metric("request_ms", MS, "lower", "Request",
               "from submission to the last token on the host, by two clock readings; median over repeats"),
        Metric("request_difference_ms", MS, "lower", "Request minus its parts",
               "largest difference between a request's time and its TTFT plus steps", plausible=(0.0, 0.001)),
        Metric("decode_read_gb_s", GB_PER_S, "", "Read in decode",
               "bytes that a decode step must read (weights without input embeddings and experts, stored "
               "K, V and scales) over mean ITL"),
        Metric("decode_bandwidth_share", RATIO, "", "Share of copy bandwidth",
               "decode_read_gb_s without the bytes that the device's cache can hold, over the copy "
               "bandwidth (bytes read and written) of the same run", plausible=(0.0, 1.2)),
        Metric("latency_drift_pct", PERCENT, "", "Drift over the run",
               "change of a request's time from the first request to the last, by least squares of its "
               "logarithm over the order of all requests, with a level per arm and a common slope; "
               "t-interval of the slope; needs 4 requests", sampled=True),
        Metric("latency_outliers", REQUESTS, "lower", "Outlying requests",
               "requests of both arms whose TTFT or mean ITL has a modified z-score above 3.5 (0.6745 |x - "
               "median| / MAD, of the logarithms within the arm) and is 5% or more from the arm's median; "
               "needs 5 requests per arm; outliers stay in every value"),
        Metric("itl_outlier_share", SHARE, "lower", "Stalled steps",
               "share of the steps that take over twice their request's median step; needs 5 steps each"),
        Metric("throttled_requests", REQUESTS, "lower", "Slowed-down requests",
               "requests of both arms during which the device was slowed down: hw slowdown, sw thermal, hw "
               "thermal or hw power brake before or after it, or 1% or more of its time lost to thermal "
               "violations or the CPU quota of the process's control groups; a power cap does not count"),
    )),
    *contexts.TABLES,
)  # fmt: skip
