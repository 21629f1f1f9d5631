"""Heat tables: a metric over two axes of the matrix, each value with its interval and count, its place on a scale as the colour.

Drawn from the metric tables, so that every cell links to the line that it is taken from. The colour says nothing that the number
does not say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import short
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.units import NUMBER
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.sections.tables import Entry, Line, MetricTable

_ACROSS = ("context", "scale", "batch")  # the first of them that varies makes the columns
_STEPS = 8  # of a scale from the lowest value to the highest
_ARMS = 4  # of each arm of a scale around no change
_WIDE = 20.0  # values that differ by more than this factor are set apart by their logarithm


@dataclass(frozen=True)
class HeatCell:
    """shade: its class on the page, "q0" to "q8", or "lo1" to "lo4" and "hi1" to "hi4" around no change, "" where there is no
    value; anchor: the line of the metric table that it is of."""

    entry: Entry
    shade: str
    anchor: str


@dataclass(frozen=True)
class HeatRow:
    label: Label
    parts: tuple[tuple[str, str], ...]
    variant: str
    cells: tuple[HeatCell | None, ...]


@dataclass(frozen=True)
class HeatTable:
    """across: the key of the columns; around: the value that is no change, as text, or "" where the scale runs from low to high;
    low, high: its ends as text; better: what the metric says of a lower or a higher value."""

    key: str
    metric: str
    heading: str
    unit: str
    better: str
    across: str
    columns: tuple[str, ...]
    rows: tuple[HeatRow, ...]
    around: str
    low: str
    high: str


def heat_tables(tables: Sequence[MetricTable], labels: Labels) -> tuple[HeatTable, ...]:
    """One for each brief metric whose values differ along both axes; a metric that is constant along one needs no map."""
    found = []
    for table in tables:
        lines = [(line, f"{table.key}-{i}") for i, line in enumerate(table.lines)]
        for place, column in enumerate(table.columns):
            if column.brief:
                heat = _table(table, place, lines, labels)
                found += [heat] if heat else []
    return tuple(found)


def _table(
    table: MetricTable, place: int, lines: Sequence[tuple[Line, str]], labels: Labels
) -> HeatTable | None:
    valued = [(line, anchor, entry) for line, anchor in lines if (entry := line.entries[place])]
    across = next(
        (key for key in _ACROSS if len({_coordinate(line, key, labels) for line, _, _ in valued}) > 1), ""
    )
    if not across:
        return None
    grid: dict[tuple[tuple[tuple[str, str], ...], str], dict[Any, tuple[Entry, str]]] = {}
    first: dict[tuple[tuple[tuple[str, str], ...], str], Label] = {}
    columns: dict[Any, str] = {}
    for line, anchor, entry in valued:
        parts = tuple(part for part in line.label.parts if part[0] != across)
        at = _coordinate(line, across, labels)
        columns[at] = _heading(line, across, labels)
        row = grid.setdefault((parts, line.variant), {})
        if at in row:
            return None  # two lines at one place: the axes do not tell them apart
        row[at] = (entry, anchor)
        first.setdefault((parts, line.variant), line.label)
    order = sorted(columns, key=lambda at: (at is None, isinstance(at, str), at if at is not None else 0))
    values = {key: [_value(row[at][0]) if at in row else None for at in order] for key, row in grid.items()}
    if not _varies(list(values.values())):
        return None
    shades = _Shades(
        [v for row in values.values() for v in row if v is not None], table.columns[place].metric
    )
    rows = tuple(
        HeatRow(first[key], key[0], key[1], tuple(
            HeatCell(row[at][0], shades.of(_value(row[at][0])), row[at][1]) if at in row else None for at in order))
        for key, row in grid.items()
    )  # fmt: skip
    column = table.columns[place]
    metric = METRICS.get(column.metric)
    return HeatTable(
        f"{table.key}-{column.metric}", column.metric, f"{table.title}: {column.heading}", column.unit.name, metric.better if metric else "",
        across, tuple(columns[at] for at in order), rows, shades.around, column.unit.number(shades.low), column.unit.number(shades.high),
    )  # fmt: skip


def _coordinate(line: Line, key: str, labels: Labels) -> Any:
    """Where the line stands on an axis; None where it has no place there: a format without a scale, a task that ignores the key."""
    if not line.label.cells or line.label.cells[0] not in labels.cells:
        return None
    if key != "scale" and key not in (part[0] for part in line.label.parts):
        return None
    value = labels.cells[line.label.cells[0]].spec.get(key)
    return short(value) if isinstance(value, Mapping) else value


def _heading(line: Line, key: str, labels: Labels) -> str:
    value = _coordinate(line, key, labels)
    return "none given" if value is None else one_line(str(value), 60)


def _value(entry: Entry) -> float | None:
    value = float(entry.shown.exact) if entry.shown.exact else None
    return value if value is not None and math.isfinite(value) else None


def _varies(rows: Sequence[Sequence[float | None]]) -> bool:
    """Whether some row differs within itself, and some column too."""

    def differs(line: Sequence[float | None]) -> bool:
        return len({value for value in line if value is not None}) > 1

    return any(map(differs, rows)) and any(map(differs, zip(*rows, strict=True)))


class _Shades:
    """Values to shades: from the lowest to the highest, or in two arms around no change."""

    def __init__(self, values: Sequence[float], name: str) -> None:
        metric = METRICS.get(name)
        none = metric.none if metric else None
        self.low, self.high = min(values), max(values)
        two_sided = none is not None and self.low < none < self.high
        self.none = none if two_sided else None
        self.around = NUMBER.number(none) if two_sided and none is not None else ""
        self.log = self.low > 0 and self.high > _WIDE * self.low

    def of(self, value: float | None) -> str:
        if value is None:
            return ""
        if self.none is not None:
            arm = max(self.high - self.none, self.none - self.low)
            step = round(_ARMS * (value - self.none) / arm)
            return "q0" if step == 0 else f"{'hi' if step > 0 else 'lo'}{abs(step)}"
        scale = math.log if self.log else float
        return f"q{round(_STEPS * (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low)))}"
