"""The device while latency was measured: what slowed it down, and clocks, temperature and power of each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.records.record import OK, Record
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun
from kvbench.stats import stability as steadiness

# fact of a state: (name, unit, fact of its limit)
_SHOWN = (
    ("sm_mhz", "SM", "MHz", "sm_max_mhz"),
    ("memory_mhz", "memory", "MHz", "memory_max_mhz"),
    ("temperature_c", "", "°C", ""),
    ("power_w", "", "W", "power_limit_w"),
)


@dataclass(frozen=True)
class DeviceLine:
    """slowed: what slowed the device down, in how many requests, or ""; others: other processes on the GPU, or "";
    sentence: all of it, with the ranges of each arm, to be read after the label.
    """

    label: Label
    slowed: str
    others: str
    sentence: str


def device_lines(run: JudgedRun, labels: Labels) -> tuple[DeviceLine, ...]:
    """A line a latency record that holds the device's state; older ones hold none."""
    return tuple(
        _line(record, labels.task(task))
        for record, task in run.done()
        if record.runner == "latency" and record.status == OK and "device_state" in record.facts
    )


def _line(record: Record, label: Label) -> DeviceLine:
    arms, facts = record.samples.get("arms", ()), record.facts["device_state"]
    slowed = steadiness.slowdown_text(arms)
    known = sum(steadiness.slowdown(arm) is not None for arm in arms)
    if not slowed:
        some = f"nothing slowed down {known} of {len(arms)} requests"
        slowed_said = some if known else "whether anything slowed it down could not be read"
    else:
        slowed_said = f"slowed down in {slowed}"
    names = dict.fromkeys(arm["arm"] for arm in arms)
    parts = [
        f"{name} {found}"
        for name in sorted(names, reverse=True)
        if (found := _ranges([arm for arm in arms if arm["arm"] == name], facts))
    ]
    others = steadiness.other_processes_text(facts.get("other_processes"))
    unread = [f"{fact} not read: {reason}" for fact, reason in facts.get("unread", {}).items()]
    sentence = "; ".join(filter(None, (slowed_said, *parts, others, *unread)))
    return DeviceLine(label, one_line(slowed, 300), one_line(others, 200), one_line(sentence, 1500))


def _ranges(arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """`SM 1350-1980 of 1980 MHz, 41-62 °C, 240-480 of 700 W, sw power cap in 2, steal 0.4%` of one arm's requests."""
    said = []
    for fact, name, unit, limit in _SHOWN:
        values = steadiness.device_values(arms, fact)
        if values:
            ends = list(dict.fromkeys(f"{end:.0f}" for end in (min(values), max(values))))
            most = f" of {facts[limit]:.0f}" if facts.get(limit) is not None else ""
            said.append(f"{name} {'-'.join(ends)}{most} {unit}".strip())
    states = [arm["device"] for arm in arms if arm.get("device")]
    capped = sum(
        any("sw power cap" in (end.get("reasons") or ()) for end in (s["before"], s["after"])) for s in states
    )
    said += [f"sw power cap in {capped} of {len(arms)}"] if capped else []
    for key, word, factor in (
        ("quota_us", "CPU quota took", 1e-3),
        ("thermal_ns", "thermal violations took", 1e-6),
    ):
        grown = [lost for s in states if (lost := steadiness.grown(s["before"], s["after"], key))]
        said += [f"{word} {sum(grown) * factor:.3g} ms"] if grown else []
    stolen = _steal(states)
    said += [f"steal {stolen:.1%}"] if stolen else []
    return ", ".join(said)


def _steal(states: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the CPUs' time that went to other machines, of these requests together."""
    grown = [
        (steal, ticks)
        for s in states
        if (steal := steadiness.grown(s["before"], s["after"], "steal_ticks")) is not None
        and (ticks := steadiness.grown(s["before"], s["after"], "cpu_ticks"))
    ]
    return sum(steal for steal, _ in grown) / sum(ticks for _, ticks in grown) if grown else None
