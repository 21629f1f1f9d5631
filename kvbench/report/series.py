"""The numbers behind the plots, taken from rows and records; `kvbench.report.plots` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from kvbench.record import OK
from kvbench.report.labels import Labels
from kvbench.report.model import Run

_SHAPE_KEYS = ("batch", "context")
_MOST_BARS = 24


@dataclass(frozen=True)
class ItlPoint:
    """value, low, high: ms; repeats: the mean ITL of each measured request, ms."""

    batch: int
    context: int
    value: float
    low: float | None
    high: float | None
    repeats: tuple[float, ...]


@dataclass(frozen=True)
class ItlSeries:
    """One line of the plot: the cells that differ in nothing but batch and context."""

    name: str
    points: tuple[ItlPoint, ...]


@dataclass(frozen=True)
class ByteBar:
    """One cell's KV bytes, live."""

    name: str
    payload: int
    scales: int


def itl_series(run: Run, labels: Labels) -> tuple[ItlSeries, ...]:
    repeats = _repeats(run)
    lines: dict[str, list[ItlPoint]] = {}
    for row in sorted(run.rows, key=lambda row: labels.rank(labels.cell(row.cell))):
        if row.metric == "itl_ms" and row.value is not None and row.cell in labels.cells:
            spec = labels.cells[row.cell]["spec"]
            parts = (p for p in labels.cell(row.cell).parts if p[0] not in _SHAPE_KEYS)
            name = " · ".join(value if key == "kv_format" else f"{key} {value}" for key, value in parts)
            point = ItlPoint(
                spec["batch"], spec["context"], row.value, row.low, row.high, repeats.get(row.cell, ())
            )
            lines.setdefault(name, []).append(point)
    return tuple(ItlSeries(name, tuple(points)) for name, points in lines.items())


def _repeats(run: Run) -> dict[str, tuple[float, ...]]:
    means: dict[str, tuple[float, ...]] = {}
    for record, task in run.done():
        if record.runner == "latency" and record.status == OK:
            own = tuple(
                fsum(arm["itl_ms"]) / len(arm["itl_ms"])
                for arm in record.samples.get("arms", ())
                if arm["arm"] == "candidate" and arm["itl_ms"]
            )
            means.update(dict.fromkeys(task["cells"], own))
    return means


def byte_bars(run: Run, labels: Labels) -> tuple[tuple[ByteBar, ...], str]:
    """The bars, and of which cells they are: of all, or of the largest shape where all would fill pages."""
    values = {(row.cell, row.metric): row.value for row in run.rows}
    of, shown = "each cell", list(labels.cells)
    if len(shown) > _MOST_BARS:
        sizes = {
            cell: labels.cells[cell]["spec"]["batch"] * labels.cells[cell]["spec"]["context"]
            for cell in shown
        }
        of, shown = "the largest cells", [cell for cell in shown if sizes[cell] == max(sizes.values())]
    bars = []
    for label in sorted((labels.cell(cell) for cell in shown), key=labels.rank):
        payload = values.get((label.cells[0], "kv_bytes_payload"))
        scales = values.get((label.cells[0], "kv_bytes_scales"))
        if payload is not None and scales is not None and isfinite(payload) and isfinite(scales):
            bars.append(ByteBar(label.text, int(payload), int(scales)))
    return tuple(bars), of


def shapes(series: Sequence[ItlSeries]) -> tuple[list[int], list[int]]:
    """The batches and the contexts that any series has, ascending."""
    points = [point for line in series for point in line.points]
    return sorted({p.batch for p in points}), sorted({p.context for p in points})
