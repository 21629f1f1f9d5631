"""The data of the plots of times and bytes, from rows and records; `kvbench.report.figures.plots` draws
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Any

from kvbench.machine.same_machine import apart
from kvbench.metrics.collect import Row
from kvbench.render.labels import Labels
from kvbench.report.figures.records import completed
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Interval, clustered_ratio, median_interval

STORED = ("payload", "scales", "page_table")
PARTS = (*STORED, "workspace", "held")

_MOST_BARS = 24  # more cells than that show only the largest shape
_MOST_DOTS = 400  # more requests cannot be told apart, and each adds text to the page
_LOG_FROM = 8  # a larger ratio of the largest to the smallest value takes a logarithmic axis

Arms = Sequence[Mapping[str, Any]]
Times = tuple[tuple[float, ...], Interval | None]  # one value per request, and an interval over them


@dataclass(frozen=True)
class TimePoint:
    """value, low, high, repeats: ms; repeats: one value per measured request; n: samples of the value."""

    batch: int
    context: int
    value: float
    low: float | None
    high: float | None
    repeats: tuple[float, ...]
    n: int | None = None


@dataclass(frozen=True)
class TimeSeries:
    """Cells that differ only in batch and context. apart: why their points are not joined, or ""."""

    name: str
    points: tuple[TimePoint, ...]
    apart: str = ""


@dataclass(frozen=True)
class ByteBar:
    """One cell's bytes; None: not measured.

    payload, scales, page_table: live tensors of the cache; workspace, held: `workspace_bytes` and
    `held_bytes`; native16: a 2-byte native cache of the same shape, by the formula.
    """

    name: str
    payload: int
    scales: int
    page_table: int | None = None
    workspace: int | None = None
    held: int | None = None
    native16: int | None = None


def itl_series(run: JudgedRun, labels: Labels) -> tuple[TimeSeries, ...]:
    """Mean inter-token latency, with a t-interval over requests."""

    def of(arms: Arms) -> Times:
        gaps = [arm["itl_ms"] for arm in arms if arm["itl_ms"]]
        if not gaps:
            return (), None
        sums, counts = [fsum(each) for each in gaps], [len(each) for each in gaps]
        whole = clustered_ratio(sums, counts, range(len(gaps)))
        return tuple(total / n for total, n in zip(sums, counts, strict=True)), whole.interval

    return _series(run, labels, "itl_ms", of)


def ttft_series(run: JudgedRun, labels: Labels) -> tuple[TimeSeries, ...]:
    """Median time to first token, with an order-statistic interval, which takes at least 6 requests."""

    def of(arms: Arms) -> Times:
        times = tuple(arm["ttft_ms"] for arm in arms)
        return times, median_interval(times)

    return _series(run, labels, "ttft_ms", of)


def _series(
    run: JudgedRun, labels: Labels, metric: str, of: Callable[[Arms], Times]
) -> tuple[TimeSeries, ...]:
    found: dict[str, Times] = {}
    machines: dict[str, Mapping[str, Any]] = {}
    for record, _, cells in completed(run, labels, "latency"):
        own = of([arm for arm in record.samples.get("arms", ()) if arm["arm"] == "candidate"])
        found.update(dict.fromkeys(cells, own))
        machines.update(dict.fromkeys(cells, record.environment))
    points: dict[str, list[TimePoint]] = {}
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    rows = [row for row in run.rows if row.metric == metric and row.cell in labels.cells]
    for row in sorted(rows, key=lambda row: labels.rank(labels.cell(row.cell))):
        if row.value is None or not isfinite(row.value):
            continue
        spec = labels.cells[row.cell].spec
        repeats, interval = found.get(row.cell, ((), None))
        low, high = (row.low, row.high) if row.low is not None else interval or (None, None)
        point = TimePoint(spec["batch"], spec["context"], row.value, low, high, repeats, row.n)
        name = labels.cell(row.cell).without("batch", "context")
        points.setdefault(name, []).append(point)
        hosts.setdefault(name, []).append(machines.get(row.cell, {}))
    return tuple(TimeSeries(name, tuple(own), apart(hosts[name])) for name, own in points.items())


def byte_bars(run: JudgedRun, labels: Labels) -> tuple[tuple[ByteBar, ...], str]:
    """One bar per cell, or per cell of the largest shape if there are too many; and which cells these are."""
    values = {(row.cell, row.metric): row for row in run.rows}
    native16: dict[str, int] = {}
    for record, _, cells in completed(run, labels, "storage"):
        if record.facts.get("native16_bytes"):
            native16.update(dict.fromkeys(cells, record.facts["native16_bytes"]))
    of, shown = "each cell", list(labels.cells)
    if len(shown) > _MOST_BARS:
        sizes = {cell: each.spec["batch"] * each.spec["context"] for cell, each in labels.cells.items()}
        of, shown = "the largest cells", [cell for cell in shown if sizes[cell] == max(sizes.values())]
    bars = []
    for label in sorted((labels.cell(cell) for cell in shown), key=labels.rank):
        cell = label.cells[0]
        payload, scales = (_whole(values.get((cell, f"kv_bytes_{part}"))) for part in ("payload", "scales"))
        if payload is not None and scales is not None:
            table, workspace, held = (_whole(values.get((cell, f"{part}_bytes"))) for part in PARTS[2:])
            bars.append(ByteBar(label.text, payload, scales, table, workspace, held, native16.get(cell)))
    return tuple(bars), of


def _whole(row: Row | None) -> int | None:
    """The row's bytes; None if it has no finite value."""
    return int(row.value) if row and row.value is not None and isfinite(row.value) else None


def shapes(series: Sequence[TimeSeries]) -> tuple[list[int], list[int]]:
    """The batches and the contexts of all series, ascending."""
    points = [point for line in series for point in line.points]
    return sorted({p.batch for p in points}), sorted({p.context for p in points})


def wide(series: Sequence[TimeSeries]) -> bool:
    """Whether the values span so much that they need a logarithmic axis."""
    values = [point.value for line in series for point in line.points]
    return min(values) > 0 and max(values) > _LOG_FROM * min(values)


def crowded(series: Sequence[TimeSeries]) -> bool:
    """Whether there are too many single requests to draw."""
    return sum(len(point.repeats) for line in series for point in line.points) > _MOST_DOTS
