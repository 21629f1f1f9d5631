"""The device while latency was measured: throttling, and clocks, temperature and power of each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.records.record import OK, Record
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun
from kvbench.stats import stability

# fact of a state: (name, unit, fact of its limit)
_SHOWN = (
    ("sm_mhz", "SM", "MHz", "sm_max_mhz"),
    ("memory_mhz", "memory", "MHz", "memory_max_mhz"),
    ("temperature_c", "", "°C", ""),
    ("power_w", "", "W", "power_limit_w"),
)


@dataclass(frozen=True)
class DeviceLine:
    """slowed: why and in how many requests the device was throttled, or ""; others: other processes on the
    GPU, or ""; sentence: everything, with the ranges of each arm.
    """

    label: Label
    slowed: str
    others: str
    sentence: str


def device_lines(run: JudgedRun, labels: Labels) -> tuple[DeviceLine, ...]:
    """A line for each latency record that has the device's state; older records have none."""
    return tuple(
        _line(record, labels.task(task))
        for record, task in run.done()
        if record.runner == "latency" and record.status == OK and "device_state" in record.facts
    )


def _line(record: Record, label: Label) -> DeviceLine:
    arms, facts = record.samples.get("arms", ()), record.facts["device_state"]
    slowed = stability.slowdown_text(arms)
    known = sum(stability.slowdown(arm) is not None for arm in arms)
    if slowed:
        state = f"throttled in {slowed}"
    elif known:
        state = f"not throttled in {known} of {len(arms)} requests"
    else:
        state = "whether it was throttled could not be read"
    names = sorted({arm["arm"] for arm in arms}, reverse=True)
    ranges = {name: _ranges([arm for arm in arms if arm["arm"] == name], facts) for name in names}
    parts = [f"{name} {text}" for name, text in ranges.items() if text]
    others = stability.other_processes_text(facts.get("other_processes"))
    unread = [f"{fact} not read: {reason}" for fact, reason in facts.get("unread", {}).items()]
    sentence = "; ".join(filter(None, (state, *parts, others, *unread)))
    return DeviceLine(label, one_line(slowed, 300), one_line(others, 200), one_line(sentence, 1500))


def _ranges(arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Of one arm: `SM 1350-1980 of 1980 MHz, 41-62 °C, 240-480 of 700 W, sw power cap in 2, steal 0.4%`."""
    found = []
    for fact, name, unit, limit in _SHOWN:
        if values := stability.device_values(arms, fact):
            ends = dict.fromkeys(f"{end:.0f}" for end in (min(values), max(values)))
            most = f" of {facts[limit]:.0f}" if facts.get(limit) is not None else ""
            found.append(f"{name} {'-'.join(ends)}{most} {unit}".strip())
    states = [(arm["device"]["before"], arm["device"]["after"]) for arm in arms if arm.get("device")]
    if capped := sum(any("sw power cap" in (end.get("reasons") or ()) for end in ends) for ends in states):
        found.append(f"sw power cap in {capped} of {len(arms)}")
    for key, word, ms in (
        ("quota_us", "CPU quota took", 1e-3),
        ("thermal_ns", "thermal violations took", 1e-6),
    ):
        if grown := [lost for ends in states if (lost := stability.grown(*ends, key))]:
            found.append(f"{word} {sum(grown) * ms:.3g} ms")
    if stolen := _steal(states):
        found.append(f"steal {stolen:.1%}")
    return ", ".join(found)


def _steal(states: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float | None:
    """Share of the CPUs' time that other machines of the host took during these requests."""
    grown = [
        (steal, ticks)
        for ends in states
        if (steal := stability.grown(*ends, "steal_ticks")) is not None
        and (ticks := stability.grown(*ends, "cpu_ticks"))
    ]
    return sum(steal for steal, _ in grown) / sum(ticks for _, ticks in grown) if grown else None
