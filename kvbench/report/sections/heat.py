"""Heat tables: a metric over two axes of the matrix, each value with its interval and count, and a shade for
its place on a scale.

They are made from the metric tables, so that every cell links to its line.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import short
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.units import NUMBER
from kvbench.render.labels import Label
from kvbench.render.numbers import finite, one_line
from kvbench.report.model import JudgedRun
from kvbench.report.sections.tables import Entry, Line, MetricTable

_ACROSS = ("context", "scale", "batch")  # the first of them that varies makes the columns
_STEPS = 8  # of a scale from the lowest value to the highest
_SIDE_STEPS = 4  # of each side of a scale around "no change"
_WIDE = 20.0  # values that differ by more than this factor get a logarithmic scale


@dataclass(frozen=True)
class HeatCell:
    """shade: its CSS class, "q0" to "q8", or "lo1" to "lo4" and "hi1" to "hi4" around "no change", "" without
    a value; anchor: its line in the metric table.
    """

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
    """across: the key of the columns; around: the value of "no change", or "" if the scale runs from low to
    high; low, high: its ends; better: "lower" or "higher".
    """

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


def heat_tables(run: JudgedRun, tables: Sequence[MetricTable]) -> tuple[HeatTable, ...]:
    """One for each brief metric whose values differ along both axes."""
    found = (_table(run, table, place) for table in tables for place in table.brief)
    return tuple(heat for heat in found if heat)


def _table(run: JudgedRun, table: MetricTable, place: int) -> HeatTable | None:
    lines = ((line, f"{table.key}-{i}", line.entries[place]) for i, line in enumerate(table.lines))
    valued = [(line, anchor, entry) for line, anchor, entry in lines if entry]
    across = next((key for key in _ACROSS if len({_coordinate(run, x[0], key) for x in valued}) > 1), "")
    if not across:
        return None
    rows: dict[tuple[tuple[tuple[str, str], ...], str], dict[Any, tuple[Line, str, Entry]]] = {}
    for line, anchor, entry in valued:
        parts = tuple(part for part in line.label.parts if part[0] != across)
        row = rows.setdefault((parts, line.variant), {})
        at = _coordinate(run, line, across)
        if at in row:
            return None  # two lines at one place: the axes do not distinguish them
        row[at] = (line, anchor, entry)
    columns = {at for row in rows.values() for at in row}
    order = sorted(columns, key=lambda at: (at is None, isinstance(at, str), at if at is not None else 0))
    values = [[_value(row[at][2]) if at in row else None for at in order] for row in rows.values()]
    if not all(any(map(_differs, lines)) for lines in (values, zip(*values, strict=True))):
        return None
    column = table.columns[place]
    metric = METRICS.get(column.metric)
    known = [x for row in values for x in row if x is not None]
    low, high, none = min(known), max(known), metric.none if metric else None
    shades = _Shades(low, high, none if none is not None and low < none < high else None)
    made = []
    for key, row in rows.items():
        cells = (row.get(at) for at in order)
        shaded = (x and HeatCell(x[2], shades.of(_value(x[2])), x[1]) for x in cells)
        made.append(HeatRow(next(iter(row.values()))[0].label, *key, tuple(shaded)))
    return HeatTable(
        key=f"{table.key}-{column.metric}",
        metric=column.metric,
        heading=f"{table.title}: {column.heading}",
        unit=column.unit.name,
        better=metric.better if metric else "",
        across=across,
        columns=tuple("none given" if at is None else one_line(str(at), 60) for at in order),
        rows=tuple(made),
        around="" if shades.none is None else NUMBER.number(shades.none),
        low=column.unit.number(shades.low),
        high=column.unit.number(shades.high),
    )


def _coordinate(run: JudgedRun, line: Line, key: str) -> Any:
    """The line's value on an axis; None for a format without a scale, or a task that ignores the key."""
    if not line.label.cells or line.label.cells[0] not in run.run.cells:
        return None
    if key != "scale" and key not in (part[0] for part in line.label.parts):
        return None
    value = run.run.cells[line.label.cells[0]].spec.get(key)
    return short(value) if isinstance(value, Mapping) else value


def _value(entry: Entry) -> float | None:
    return finite(float(entry.shown.exact)) if entry.shown.exact else None


def _differs(line: Sequence[float | None]) -> bool:
    return len({value for value in line if value is not None}) > 1


@dataclass(frozen=True)
class _Shades:
    """Values to shades: from the lowest to the highest, or on two sides of "no change"."""

    low: float
    high: float
    none: float | None

    def of(self, value: float | None) -> str:
        if value is None:
            return ""
        if self.none is not None:
            side = max(self.high - self.none, self.none - self.low)
            step = round(_SIDE_STEPS * (value - self.none) / side)
            return "q0" if step == 0 else f"{'hi' if step > 0 else 'lo'}{abs(step)}"
        scale = math.log if self.low > 0 and self.high > _WIDE * self.low else float
        return f"q{round(_STEPS * (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low)))}"
