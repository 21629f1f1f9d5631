"""TTFT, ITL and rates of the measured requests, and their ratios to the interleaved baseline's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from kvbench.derive.value import Value, with_interval
from kvbench.record import Record
from kvbench.stats import largest, median, paired_ratio, quantile
from kvbench.timing import decode_tok_s, prefill_tok_s

Arm = dict[str, Any]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    """The ratios come from this record's own arms (A B B A in one process), not from the baseline's record."""
    arms = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    own = [arm for arm in arms if arm["arm"] == "candidate"]
    other = [arm for arm in arms if arm["arm"] == "baseline"]
    if own:
        yield from _absolute(own)
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
    note = _wrong_count(arms) or ("" if gaps else "one output token has no gap")
    n = len(gaps)
    yield Value("itl_ms", None if note else fmean(gaps), n, note=note)
    yield Value("itl_p50_ms", None if note else median(gaps), n, note=note)
    yield Value("itl_p90_ms", None if note else quantile(gaps, 0.9), n, note=note)
    yield Value("itl_p99_ms", None if note else quantile(gaps, 0.99), n, note=note)
    yield Value("itl_max_ms", None if note else largest(gaps), n, note=note)
    rate = None if note else decode_tok_s(first["batch"], [gap / 1e3 for gap in gaps])
    yield Value("decode_tok_s", rate, n, note=note)


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


def _wrong_count(arms: Sequence[Arm]) -> str:
    """N output tokens have N - 1 gaps; any other count means that TTFT or a chunk was taken for a token gap."""
    for arm in arms:
        if len(arm["itl_ms"]) != arm["new_tokens"] - 1:
            return f"{arm['new_tokens']} output tokens have {arm['new_tokens'] - 1} gaps, but {len(arm['itl_ms'])} were recorded"
    return ""
