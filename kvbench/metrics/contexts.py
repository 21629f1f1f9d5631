"""Lines through the ITL of cells that differ in their context alone: what a token of context costs."""

import json
from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import Any

from kvbench.machine.same_machine import apart
from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import MS, RATIO, TOKENS, US_PER_TOKEN
from kvbench.metrics.declare.value import Value, unmeasured, with_interval
from kvbench.records.record import OK, Record
from kvbench.records.run import Run
from kvbench.stats.latency import wrong_gap_count
from kvbench.stats.regression import CONTEXTS, Line, break_even, fit, slope_ratio

OWN = ("itl_slope_us_per_token", "itl_intercept_ms")
COMPARED = ("itl_break_even_tokens", "itl_slope_ratio", "itl_slope_to_bytes")

# Facts of the machine that all contexts of a line must share.
_MACHINE = ("device", "cpu", "gpus", "threads")


def values(run: Run) -> dict[str, list[Value]]:
    """Key of a latency task -> the values of the line that it is a point of."""
    members: dict[str, list[str]] = {}
    for task in run.tasks:
        if task.runner == "latency" and "context" in task.spec:
            rest = {k: v for k, v in task.spec.items() if k != "context"}
            group = json.dumps([rest, task.options], sort_keys=True, default=str)
            members.setdefault(group, []).append(task.key)
    found: dict[str, list[Value]] = {}
    for keys in members.values():
        records = [record for record in map(run.record, keys) if record and record.status == OK]
        found |= dict.fromkeys(keys, _values(records))
    return found


def _values(records: Sequence[Record]) -> list[Value]:
    try:
        own, baseline = (_points(records, arm) for arm in ("candidate", "baseline"))
    except (KeyError, TypeError, ValueError, AttributeError):
        return unmeasured(OWN + COMPARED, "samples of a context cannot be read; run the matrix again")
    reason = _unfit(records, own)
    line = None if reason else fit(*zip(*own, strict=True))
    if line is None:
        return unmeasured(OWN + COMPARED, reason or "a time is not finite")
    slope = _scaled(line.slope_interval, 1e3)
    found = [
        with_interval("itl_slope_us_per_token", line.slope * 1e3, line.points, slope),
        with_interval("itl_intercept_ms", line.intercept, line.points, line.intercept_interval),
    ]
    native = fit(*zip(*baseline, strict=True)) if len({x for x, _ in baseline}) >= CONTEXTS else None
    if native is None:
        return found + unmeasured(COMPARED, f"no baseline ran beside it on {CONTEXTS} contexts")
    return found + _compared(records, line, native)


def _compared(records: Sequence[Record], line: Line, native: Line) -> list[Value]:
    crossing, interval, note = break_even(line, native)
    contexts = [record.spec["context"] for record in records]
    if crossing and not min(contexts) <= crossing <= max(contexts):
        note = f"outside the contexts measured, {min(contexts):,} to {max(contexts):,}"
    found = unmeasured(COMPARED[:1], note)
    if crossing is not None:
        found = [with_interval("itl_break_even_tokens", crossing, line.points, interval, note)]
    ratio = slope_ratio(line, native)
    if ratio is None:
        return found + unmeasured(COMPARED[1:], "a line does not rise with the context")
    found.append(with_interval("itl_slope_ratio", ratio.value, ratio.units, ratio.interval))
    bytes_ = [_byte_ratio(record) for record in records]
    known = [b for b in bytes_ if b is not None]
    if len(known) < len(bytes_):
        unknown = "the record does not say what a step reads; run the matrix again"
        return found + unmeasured(COMPARED[2:], unknown)
    allowed = min(known)
    note = f"KV bytes in the ratio {allowed:.6g}; {_settings(records)}"
    interval = ratio.interval and _scaled(ratio.interval, 1 / allowed)
    share = with_interval("itl_slope_to_bytes", ratio.value / allowed, ratio.units, interval, note)
    return [*found, share]


def _points(records: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """(context, mean ITL in ms) of each measured request of the arm."""
    points = []
    for record in records:
        arms = [arm for arm in record.samples["arms"] if arm["arm"] == name and arm["itl_ms"]]
        if not wrong_gap_count(arms):
            points += [(float(record.spec["context"]), fmean(arm["itl_ms"])) for arm in arms]
    return points


def _unfit(records: Sequence[Record], points: Sequence[tuple[float, float]]) -> str:
    """Why no line goes through these records, or ""."""
    contexts = len({x for x, _ in points})
    if contexts < CONTEXTS:
        return f"a line needs {CONTEXTS} contexts, {contexts} {'was' if contexts == 1 else 'were'} measured"
    if reason := apart(record.environment for record in records):
        return f"its contexts {reason}"
    differing = [key for key in _MACHINE if len({repr(r.environment.get(key)) for r in records}) > 1]
    return f"its contexts were measured under different {', '.join(differing)}" if differing else ""


def _byte_ratio(record: Record) -> float | None:
    arms = record.facts.get("arms", {})
    try:
        own, native = (arms[name]["reads"]["kv_bytes_per_token"] for name in ("candidate", "baseline"))
    except (KeyError, TypeError):
        return None
    return own / native if own and native else None


def _settings(records: Sequence[Record]) -> str:
    """Which recorded settings of the two arms differ, as a sentence."""
    differing: dict[str, None] = {}
    for record in records:
        own, native = (record.facts["arms"][name].get("settings", {}) for name in ("candidate", "baseline"))
        for key in dict.fromkeys((*own, *native)):
            if own.get(key) != native.get(key):
                differing[f"{key} {_setting(own.get(key))} against {_setting(native.get(key))}"] = None
    if differing:
        return f"what differs besides the format: {', '.join(differing)}"
    return "no recorded setting differs besides the format"


def _setting(value: Any) -> str:
    return " and ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _scaled(interval: tuple[float, float], factor: float) -> tuple[float, float]:
    return interval[0] * factor, interval[1] * factor


TABLES: tuple[Table, ...] = (
    Table("contexts", "ITL over the context", counted="requests", facts=False, over="context",
          note="A least-squares line through the requests of cells that differ only in their context, "
               "compared with the line through the baseline's interleaved requests. Beyond the break-even "
               "the candidate is faster. A slope ratio below the ratio of the KV bytes (last column below "
               "1) is not explained by the format alone.",
          metrics=(
        Metric("itl_slope_us_per_token", US_PER_TOKEN, "lower", "Slope",
               "least-squares slope of ITL over cells that differ in context alone; t-interval", brief=True),
        Metric("itl_intercept_ms", MS, "lower", "At no context",
               "ITL of that line at context 0; t-interval", plausible=(-inf, inf)),
        Metric("itl_break_even_tokens", TOKENS, "lower", "Break-even",
               "context from which that line lies below the interleaved baseline's", paired=True, brief=True),
        Metric("itl_slope_ratio", RATIO, "lower", "Slope ratio",
               "slope over the interleaved baseline's, t-interval of the log-ratio", paired=True, brief=True),
        Metric("itl_slope_to_bytes", RATIO, "", "Slope ratio to bytes",
               "itl_slope_ratio over the ratio of KV bytes per token; below 1 something other than the "
               "bytes made it faster", paired=True, brief=True),
    )),
)  # fmt: skip
