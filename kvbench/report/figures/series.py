"""The numbers behind the plots of times and bytes, taken from rows and records; `kvbench.report.figures.plots` draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Any

from kvbench.machine.same_machine import apart
from kvbench.metrics.collect import Row
from kvbench.records.record import OK
from kvbench.render.labels import Labels
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Interval, clustered_ratio, median_interval

_MOST_BARS = 24

Arms = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TimePoint:
    """value, low, high: ms; n: the samples of the value; repeats: one value of each measured request, ms, which the interval rests on."""

    batch: int
    context: int
    value: float
    low: float | None
    high: float | None
    repeats: tuple[float, ...]
    n: int | None = None


@dataclass(frozen=True)
class TimeSeries:
    """One line of the plot: the cells that differ in nothing but batch and context. apart: why its points are not joined, or ""."""

    name: str
    points: tuple[TimePoint, ...]
    apart: str = ""


STORED = ("payload", "scales", "page_table")
PARTS = (*STORED, "workspace", "held")

# On an axis that begins at 0, values further apart than so many times would not be told from 0.
_WIDE = 8

# More requests than so many are not drawn one by one: no eye parts them, and each is text in the page.
_MOST_DOTS = 400


@dataclass(frozen=True)
class ByteBar:
    """One cell's bytes: the cache, live, and what stands beside it on the device. None: not measured.

    workspace: the most that a run took beyond what was there when it began; held: what was held before there were pages, less the
    weights; native16: the formula's bytes of a 2-byte native cache of the same shape.
    """

    name: str
    payload: int
    scales: int
    page_table: int | None = None
    workspace: int | None = None
    held: int | None = None
    native16: int | None = None


def itl_series(run: JudgedRun, labels: Labels) -> tuple[TimeSeries, ...]:
    """Means, their t-interval over requests."""

    def of(arms: Arms) -> tuple[tuple[float, ...], Interval | None]:
        gaps = [arm["itl_ms"] for arm in arms if arm["itl_ms"]]
        if not gaps:
            return (), None
        sums, counts = [fsum(each) for each in gaps], [len(each) for each in gaps]
        whole = clustered_ratio(sums, counts, range(len(gaps)))
        return tuple(total / n for total, n in zip(sums, counts, strict=True)), whole.interval

    return _series(run, labels, "itl_ms", of)


def ttft_series(run: JudgedRun, labels: Labels) -> tuple[TimeSeries, ...]:
    """Medians; an interval of a median takes more requests than a mean's (`kvbench.stats.intervals.median_interval`)."""

    def of(arms: Arms) -> tuple[tuple[float, ...], Interval | None]:
        times = tuple(arm["ttft_ms"] for arm in arms)
        return times, median_interval(times)

    return _series(run, labels, "ttft_ms", of)


def _series(
    run: JudgedRun,
    labels: Labels,
    metric: str,
    of: Callable[[Arms], tuple[tuple[float, ...], Interval | None]],
) -> tuple[TimeSeries, ...]:
    found: dict[str, tuple[tuple[float, ...], Interval | None]] = {}
    machines: dict[str, Mapping[str, Any]] = {}
    for record, task in run.done():
        if record.runner == "latency" and record.status == OK:
            own = of([arm for arm in record.samples.get("arms", ()) if arm["arm"] == "candidate"])
            found.update(dict.fromkeys(task.cells, own))
            machines.update(dict.fromkeys(task.cells, record.environment))
    lines: dict[str, list[TimePoint]] = {}
    of_line: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(run.rows, key=lambda row: labels.rank(labels.cell(row.cell))):
        # What is no number has no place on an axis; its check fails, and the table has it.
        if (
            row.metric == metric
            and row.value is not None
            and isfinite(row.value)
            and row.cell in labels.cells
        ):
            spec = labels.cells[row.cell].spec
            repeats, interval = found.get(row.cell, ((), None))
            low, high = (row.low, row.high) if row.low is not None else interval or (None, None)
            point = TimePoint(spec["batch"], spec["context"], row.value, low, high, repeats, row.n)
            name = labels.cell(row.cell).without("batch", "context")
            lines.setdefault(name, []).append(point)
            of_line.setdefault(name, []).append(machines.get(row.cell, {}))
    return tuple(TimeSeries(name, tuple(points), apart(of_line[name])) for name, points in lines.items())


def byte_bars(run: JudgedRun, labels: Labels) -> tuple[tuple[ByteBar, ...], str]:
    """The bars, and of which cells they are: of all, or of the largest shape where all would fill pages."""
    values = {(row.cell, row.metric): row for row in run.rows}
    native16 = _native16(run)
    of, shown = "each cell", list(labels.cells)
    if len(shown) > _MOST_BARS:
        sizes = {
            cell: labels.cells[cell].spec["batch"] * labels.cells[cell].spec["context"] for cell in shown
        }
        of, shown = "the largest cells", [cell for cell in shown if sizes[cell] == max(sizes.values())]
    bars = []
    for label in sorted((labels.cell(cell) for cell in shown), key=labels.rank):
        cell = label.cells[0]
        payload, scales = (_whole(values.get((cell, f"kv_bytes_{part}"))) for part in ("payload", "scales"))
        if payload is not None and scales is not None:
            table, workspace, held = (
                _whole(values.get((cell, f"{part}_bytes"))) for part in ("page_table", "workspace", "held")
            )
            bars.append(ByteBar(label.text, payload, scales, table, workspace, held, native16.get(cell)))
    return tuple(bars), of


def _whole(row: Row | None) -> int | None:
    """The row's bytes; None where nothing was measured, or no number."""
    return int(row.value) if row and row.value is not None and isfinite(row.value) else None


def _native16(run: JudgedRun) -> dict[str, int]:
    found: dict[str, int] = {}
    for record, task in run.done():
        if record.runner == "storage" and record.status == OK and record.facts.get("native16_bytes"):
            found.update(dict.fromkeys(task.cells, record.facts["native16_bytes"]))
    return found


def shapes(series: Sequence[TimeSeries]) -> tuple[list[int], list[int]]:
    """The batches and the contexts that any series has, ascending."""
    points = [point for line in series for point in line.points]
    return sorted({p.batch for p in points}), sorted({p.context for p in points})


def wide(series: Sequence[TimeSeries]) -> bool:
    """Whether the values are so far apart that they take a log axis."""
    values = [point.value for line in series for point in line.points]
    return min(values) > 0 and max(values) > _WIDE * min(values)


def crowded(series: Sequence[TimeSeries]) -> bool:
    """Whether the single requests are too many to be drawn."""
    return sum(len(point.repeats) for line in series for point in line.points) > _MOST_DOTS
