"""Compares stored rows with a published table: sign, order and ratio.

A `Rule` matches a published line with our metric of one cell, or of a baseline and a candidate. It is
compared as:

exact   ours rounds to the printed number (bytes)
change  from baseline to candidate: both up, both down, or both within `band` of no change
same    ours is 0, as published (two runs with equal picks)
value   no sign: it counts in the order of its column

A number stands for an interval: all numbers that round to a published one, and the 95% interval of ours where
the metric has one. Overlapping intervals are open, never agreement.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.matrix.cells import Cell
from kvbench.metrics.collect import METRICS, Row
from kvbench.published.shape import (
    AGREES,
    COMPUTED,
    DIFFERS,
    LEFT_OUT,
    NOT_RUN,
    OPEN,
    SHOWN,
    Compared,
    Interval,
    Shape,
    direction,
    order_of,
    stated_change,
)
from kvbench.published.table import BYTES, Line

EXACT, CHANGE, SAME, VALUE = "exact", "change", "same", "value"

Keys = Mapping[str, Any]

# Our paired metrics as a change: the log of candidate over baseline, or points.
PAIRED: dict[str, Callable[[float], float]] = {
    "itl_ratio": math.log,
    "ttft_ratio": math.log,
    "ppl_delta_pct": lambda pct: math.log1p(pct / 100),
    "mcq_delta_pt": float,
}


@dataclass(frozen=True)
class Rule:
    """Selects published lines (by metric and texts) and the matching metric `ours`.

    candidate, baseline: keys of the cell on either side; `reads` names the keys that the line adds. paired:
    our metric against the native baseline, with an interval; inverse: it is of a time, and the line a rate.
    factor: ours in the published unit; per_token: divide ours by the token slots; points: a change is a
    difference. band: a change up to it counts as none (the published target). states: a statement in words,
    as an interval. left_out: why kvbench has no counterpart. formula: computed from the line alone, so
    nothing is measured.
    """

    metric: str
    how: str = CHANGE
    ours: str = ""
    candidate: Keys = field(default_factory=dict)
    baseline: Keys | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    paired: str = ""
    inverse: bool = False
    factor: float = 1.0
    per_token: bool = False
    points: bool = False
    band: float = 0.0
    variant: str = ""
    states: Interval | None = None
    left_out: str = ""
    formula: Callable[[Line], float] | None = None

    def takes(self, line: Line) -> bool:
        return self.metric == line.metric and all(line.texts.get(k) == v for k, v in self.texts.items())


class Ours:
    """Finds the rows of a run by the keys of their cell."""

    def __init__(self, cells: Iterable[Cell], rows: Iterable[Row]) -> None:
        self.specs = {cell.id: cell.spec for cell in cells}
        self.rows = list(rows)

    def find(self, keys: Keys, metric: str, variant: str = "") -> Row | str:
        """The single matching row, or why there is none."""
        cells = [at for at, spec in self.specs.items() if all(spec.get(k) == v for k, v in keys.items())]
        named = ", ".join(f"{key} {'auto' if value is None else value}" for key, value in keys.items())
        if len(cells) != 1:
            return (
                f"{'no cell' if not cells else f'{len(cells)} cells'} of the run with {named or 'any keys'}"
            )
        found = [
            r
            for r in self.rows
            if r.cell == cells[0] and r.metric == metric and r.variant.startswith(variant)
        ]
        if not found:
            return (
                f"the run measured no {metric}{f' of {variant}' if variant else ''} on the cell with {named}"
            )
        if found[0].value is None or not math.isfinite(found[0].value):
            return found[0].note or f"{metric} has no value"
        return found[0]

    def slots(self, row: Row) -> float:
        spec = self.specs[row.cell]
        return float(spec["batch"] * -(-spec["context"] // spec["page_size"]) * spec["page_size"])

    def is_baseline(self, row: Row) -> bool:
        spec = self.specs[row.cell]
        return bool(spec["kv_format"] == spec["weights"] == "native")


def compare(lines: Sequence[Line], rules: Sequence[Rule], stand_ins: Mapping[str, str], ours: Ours) -> Shape:
    """stand_ins: our model for each published one, where a table has several."""
    rows: list[Compared] = []
    columns: dict[str, list[tuple[str, Interval, Interval]]] = {}
    for line in lines:
        rule = next((rule for rule in rules if rule.takes(line)), None)
        if rule is None:
            rows.append(_without(line, LEFT_OUT, "kvbench has no counterpart of this line."))
        elif rule.left_out:
            rows.append(_without(line, LEFT_OUT, rule.left_out))
        else:
            rows.append(_compared(line, rule, stand_ins, ours, columns))
    return Shape(tuple(rows), tuple(order_of(name, own) for name, own in columns.items() if len(own) > 1))


def _name(line: Line) -> str:
    scale = f"scale {line.numbers['candidate'].text}" if line.metric == "static_scale" else ""
    return ", ".join(filter(None, (line.metric, scale, line.place)))


def _without(line: Line, state: str, why: str) -> Compared:
    return Compared(_name(line), state, _published(line), {}, None, why)


def _published(line: Line) -> dict[str, str]:
    return {side: line.shown(side) for side in ("baseline", "candidate") if side in line.numbers}


def _keys(rule: Rule, side: Keys, line: Line, stand_ins: Mapping[str, str]) -> dict[str, Any]:
    keys = dict(side)
    for key in rule.reads:
        if key == "model":
            keys["model"] = stand_ins.get(line.texts["model"], line.texts["model"])
        elif key == "scale":
            keys["scale"] = line.numbers["candidate"].middle
        else:
            keys["context" if key == "tokens" else key] = line.counts[key]
    return keys


def _compared(
    line: Line,
    rule: Rule,
    stand_ins: Mapping[str, str],
    ours: Ours,
    columns: dict[str, list[tuple[str, Interval, Interval]]],
) -> Compared:
    if rule.formula is not None:
        computed = _exact(line, rule, {"candidate": rule.formula(line)})
        return replace(computed, state=COMPUTED) if computed.state == AGREES else computed
    found: dict[str, Row] = {}
    for side, own in (("baseline", rule.baseline), ("candidate", rule.candidate)):
        if own is None:
            continue
        row = ours.find(_keys(rule, own, line, stand_ins), rule.ours, rule.variant)
        if isinstance(row, str):
            return _without(line, NOT_RUN, row.rstrip(".") + ".")
        found[side] = row
    values = {
        side: (row.value or 0.0) * rule.factor / (ours.slots(row) if rule.per_token else 1.0)
        for side, row in found.items()
    }
    if rule.how == EXACT:
        return _exact(line, rule, values)
    unit = METRICS[rule.ours].unit.name if rule.states or rule.how == SAME else line.unit
    shown = {side: _text(value, unit) for side, value in values.items()}
    if rule.how == SAME:
        same = values["candidate"] == 0
        sentence = (
            "the same, as published"
            if same
            else f"{rule.ours} is {values['candidate']:.3g}, published are equal results"
        )
        return Compared(
            _name(line), AGREES if same else DIFFERS, _published(line), shown, None, sentence + "."
        )
    return _changed(line, rule, ours, found, values, shown, columns)


def _exact(line: Line, rule: Rule, values: Mapping[str, float]) -> Compared:
    """Bytes: ours rounds to each stated side. A unit of 10^3 may mean one of 2^10; the sentence then says
    so.
    """
    state, notes, ratio = AGREES, [], None
    binary = {"KB": "KiB", "MB": "MiB", "GB": "GiB"}.get(line.unit)
    for side, value in values.items():
        if side not in line.numbers:
            continue
        stated = line.numbers[side]
        low, high, meant = float(stated.low), float(stated.high), value
        if low <= value <= high:
            notes.append(f"{side} equal")
        elif binary and low <= value * BYTES[line.unit] / BYTES[binary] <= high:
            meant = value * BYTES[line.unit] / BYTES[binary]
            notes.append(f"{side} equal as {binary}, which is printed as {line.unit}")
        else:
            state = DIFFERS
            notes.append(f"{side} is {_text(value, line.unit)}, published {line.shown(side)}")
        ratio = meant / stated.middle
    shown = {side: _text(value, line.unit) for side, value in values.items()}
    return Compared(_name(line), state, _published(line), shown, ratio, "; ".join(notes) + ".")


def _changed(
    line: Line,
    rule: Rule,
    ours: Ours,
    found: Mapping[str, Row],
    values: Mapping[str, float],
    shown: dict[str, str],
    columns: dict[str, list[tuple[str, Interval, Interval]]],
) -> Compared:
    name, published = _name(line), _published(line)
    if rule.states:
        published = {"candidate": line.texts["note"]}
    stated = line.numbers.get("candidate")
    theirs = rule.states or ((float(stated.low), float(stated.high)) if stated else None)
    ratio = values["candidate"] / stated.middle if stated and not rule.states and stated.middle else None
    if theirs is not None and not rule.band:
        own = found["candidate"]
        span = (own.value, own.value) if own.low is None or own.high is None else (own.low, own.high)
        scaled = (float(span[0] or 0) * rule.factor, float(span[1] or 0) * rule.factor)
        column = rule.ours if rule.how == VALUE else f"{rule.ours} of {line.texts.get('of', 'candidate')}"
        columns.setdefault(column, []).append((name, theirs, scaled))
    stated_by_table = stated_change(line, rule.points)
    if rule.how == VALUE or stated_by_table is None or rule.baseline is None:
        note = "no sign is published; counted in the order" if theirs is not None else "shown only"
        return Compared(name, SHOWN, published, shown, ratio, note + ".")
    change = _change(rule, ours, found, values)
    if isinstance(change, str):
        return _without(line, NOT_RUN, change.rstrip(".") + ".")
    of = (
        f"{rule.ours}, change of {line.texts.get('of', 'candidate')} against "
        f"{line.texts.get('against', 'baseline')}"
    )
    if not rule.band:  # changes within a target have no order
        columns.setdefault(of, []).append((name, stated_by_table, change))
    published["change"], shown["change"] = (
        _change_text(stated_by_table, rule.points),
        _change_text(change, rule.points),
    )
    theirs_way, ours_way = direction(stated_by_table, rule.band), direction(change, rule.band)
    word = {
        1: "up",
        -1: "down",
        0: "no change" if not rule.band else "no change beyond the published target",
        None: "either way",
    }
    if theirs_way is None or ours_way is None:
        state, sentence = OPEN, f"published {word[theirs_way]}, ours {word[ours_way]}: the intervals overlap"
    elif theirs_way == ours_way:
        state, sentence = AGREES, f"both {word[ours_way]}"
    else:
        state, sentence = DIFFERS, f"published {word[theirs_way]}, ours {word[ours_way]}"
    return Compared(name, state, published, shown, ratio, sentence + ".")


def _change(rule: Rule, ours: Ours, found: Mapping[str, Row], values: Mapping[str, float]) -> Interval | str:
    """Our change from baseline to candidate as log ratio or points, by paired metrics to native where they
    exist.
    """
    if not rule.paired:
        b, c = values["baseline"], values["candidate"]
        change = c - b if rule.points else math.log(c / b) if b > 0 and c > 0 else None
        return (change, change) if change is not None else f"{rule.ours} is not above 0"
    spans: dict[str, Interval] = {}
    for side, row in found.items():
        if ours.is_baseline(row):
            spans[side] = (0.0, 0.0)
            continue
        paired = ours.find(ours.specs[row.cell], rule.paired, rule.variant)
        if isinstance(paired, str):
            return paired
        into = PAIRED[rule.paired]
        ends = (
            (paired.value, paired.value)
            if paired.low is None or paired.high is None
            else (paired.low, paired.high)
        )
        spans[side] = (into(float(ends[0] or 0)), into(float(ends[1] or 0)))
    (bl, bh), (cl, ch) = spans["baseline"], spans["candidate"]
    low, high = cl - bh, ch - bl
    return (-high, -low) if rule.inverse else (low, high)


def _change_text(change: Interval, points: bool) -> str:
    low, high = change if points else (math.exp(change[0]), math.exp(change[1]))
    sign, unit = ("+", " pt") if points else ("", "x")
    middle = (low + high) / 2 if points else math.sqrt(low * high)
    span = "" if low == high else f" [{low:{sign}.3g}, {high:{sign}.3g}]"
    return f"{middle:{sign}.4g}{unit}{span}"


def _text(value: float, unit: str) -> str:
    """Bytes whole, everything else to four digits."""
    if unit in BYTES:
        return f"{int(value):,} B" if value == int(value) else f"{value:,.1f} B"
    return f"{int(value):,} {unit}" if value == int(value) else f"{value:.4g} {unit}"
