"""What a decode step must read against the time it takes, beside the copy bandwidth that the device was measured at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from kvbench.machine.same_machine import apart
from kvbench.metrics.collect import Row
from kvbench.metrics.latency import step_bytes
from kvbench.records.record import OK
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun


@dataclass(frozen=True)
class RoofPoint:
    """weights, cache: bytes a step in the mean; rate: decode_read_gb_s; share: decode_bandwidth_share, its value None where its note
    says why; itl: itl_ms."""

    label: Label
    line: str
    weights: float
    cache: float
    itl: Row
    rate: Row
    share: Row | None


@dataclass(frozen=True)
class Roof:
    """copies: GB/s of each record that timed one; reason: why there is none, "" where there is; caches: bytes of the device's cache."""

    points: tuple[RoofPoint, ...]
    copies: tuple[float, ...]
    reason: str
    caches: tuple[int, ...]

    @property
    def copy(self) -> float | None:
        """GB/s; the median over the records."""
        return median(self.copies) if self.copies else None


def roof(run: JudgedRun, labels: Labels) -> Roof | None:
    """None where no decode step was timed."""
    rows = {(row.cell, row.metric): row for row in run.rows}
    points: list[RoofPoint] = []
    copies: list[float] = []
    machines: list[Mapping[str, Any]] = []
    reasons: list[str] = []
    caches: set[int] = set()
    for record, task in run.done():
        if record.runner != "latency" or record.status != OK:
            continue
        arms = [arm for arm in record.samples.get("arms", ()) if arm["arm"] == "candidate"]
        reads = record.facts.get("arms", {}).get("candidate", {}).get("reads")
        found = []
        for cell in task.cells if arms and reads else ():
            itl, rate = rows.get((cell, "itl_ms")), rows.get((cell, "decode_read_gb_s"))
            if cell in labels.cells and itl and rate and _positive(itl.value) and _positive(rate.value):
                label = labels.cell(cell)
                share = rows.get((cell, "decode_bandwidth_share"))
                line = label.without("batch", "context")
                found.append(RoofPoint(label, line, *step_bytes(arms[0], reads), itl, rate, share))
        points += found
        if found and record.facts.get("copy_gb_s"):
            copies.append(record.facts["copy_gb_s"])
            machines.append(record.environment)
        elif found:
            reasons.append(one_line(str(record.facts.get("copy_reason") or "it is not in the record"), 200))
        if found and record.facts.get("cache_bytes"):
            caches.add(record.facts["cache_bytes"])
    if not points:
        return None
    if separate := apart(machines):
        copies, reasons = [], [*reasons, f"the records that timed a copy {separate}"]
    points.sort(key=lambda point: labels.rank(point.label))
    return Roof(tuple(points), tuple(copies), "; ".join(dict.fromkeys(reasons)), tuple(sorted(caches)))


def _positive(value: float | None) -> bool:
    """Whether it has a place on a logarithmic axis."""
    return value is not None and isfinite(value) and value > 0
