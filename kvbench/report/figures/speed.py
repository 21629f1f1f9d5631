"""What limits speed: the bytes and time of a decode step, and the times of the linear layers' products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.machine.same_machine import apart
from kvbench.metrics.collect import Row
from kvbench.metrics.latency import step_bytes
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.figures.records import completed
from kvbench.report.model import JudgedRun

# The timed paths by their key in the record: the one that the cell uses first.
TIMED = {"us": "selected path", "us_native": "16-bit F.linear", "us_reference": "reference path"}

_MOST_SHAPES = 6  # of one cell


@dataclass(frozen=True)
class RoofPoint:
    """weights, cache: mean bytes read per step; itl, rate, share: rows of `itl_ms`, `decode_read_gb_s` and
    `decode_bandwidth_share` (without a value where its note gives a reason).
    """

    label: Label
    line: str
    weights: float
    cache: float
    itl: Row
    rate: Row
    share: Row | None


@dataclass(frozen=True)
class Roof:
    """copies: GB/s of each record that timed a copy; reason: why some have none; caches: device cache
    bytes.
    """

    points: tuple[RoofPoint, ...]
    copies: tuple[float, ...]
    reason: str
    caches: tuple[int, ...]

    @property
    def copy(self) -> float | None:
        """The median copy bandwidth over the records, GB/s."""
        return median(self.copies) if self.copies else None


def roof(run: JudgedRun, labels: Labels) -> Roof | None:
    """The points of all cells with a timed decode step; None if there are none."""
    rows = {(row.cell, row.metric): row for row in run.rows}
    points: list[RoofPoint] = []
    copies: list[float] = []
    machines: list[Mapping[str, Any]] = []
    reasons: list[str] = []
    caches: set[int] = set()
    for record, _, cells in completed(run, labels, "latency"):
        arms = [arm for arm in record.samples.get("arms", ()) if arm["arm"] == "candidate"]
        reads = record.facts.get("arms", {}).get("candidate", {}).get("reads")
        found = []
        for cell in cells if arms and reads else ():
            itl, rate = rows.get((cell, "itl_ms")), rows.get((cell, "decode_read_gb_s"))
            if itl and rate and _positive(itl.value) and _positive(rate.value):
                label, share = labels.cell(cell), rows.get((cell, "decode_bandwidth_share"))
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
    """Whether the value fits on a logarithmic axis."""
    return value is not None and isfinite(value) and value > 0


@dataclass(frozen=True)
class ProductTimes:
    """One shape N x K of one cell. rows: (M, selected path, microseconds by key of `TIMED`); weights: bytes
    of one layer's codes and scales, by the formula; warm: the runner's description of the cache state;
    dropped: how many smaller shapes of the cell are left out.
    """

    name: str
    n: int
    k: int
    rows: tuple[tuple[int, str, Mapping[str, float]], ...]
    weights: int
    warm: str
    dropped: int


def product_times(run: JudgedRun, labels: Labels) -> tuple[ProductTimes, ...]:
    """The timed shapes of quantized weights, the largest shapes of each cell first."""
    found = []
    for record, _, cells in completed(run, labels, "gemm"):
        timed = [p for p in record.samples["products"] if any(row.get("us_reference") for row in p["rows"])]
        timed.sort(key=lambda product: -product["n"] * product["k"])
        name = labels.subject("gemm", cells[0]).text
        for product in timed[:_MOST_SHAPES]:
            rows = tuple((row["m"], row["path"], _times(row)) for row in product["rows"] if row.get("us"))
            warm = one_line(str(product.get("timed_with") or ""), 300)
            fmt, n, k = WEIGHT_FORMATS[record.spec["weights"]], product["n"], product["k"]
            size = weight_bytes(fmt, n, k, "bfloat16").total
            found.append(ProductTimes(name, n, k, rows, size, warm, max(0, len(timed) - _MOST_SHAPES)))
    return tuple(found)


def _times(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: row[key] for key in TIMED if row.get(key)}
