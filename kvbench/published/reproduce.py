"""Compares stored rows with a published table: sign, order, ratio, and the verdict over all lines.

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
from itertools import combinations
from typing import Any

from kvbench.matrix.cells import Cell
from kvbench.metrics.collect import METRICS, Row
from kvbench.published.table import BYTES, Line

EXACT, CHANGE, SAME, VALUE = "exact", "change", "same", "value"
AGREES, DIFFERS, OPEN, SHOWN, NOT_RUN, LEFT_OUT = "agrees", "differs", "open", "shown", "not run", "left out"
COMPUTED = "computed from the published numbers"  # not measured, so no agreement
_VERDICTS = {0: "the shape agrees", 1: "the shape differs", 3: "not all was run", 4: "the data cannot tell"}

Keys = Mapping[str, Any]
Interval = tuple[float, float]
Columns = dict[str, list[tuple[str, Interval, Interval]]]  # column -> (line, published, ours)

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
    as an interval. left_out: why kvbench has no counterpart. formula: computed from the line alone.
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


@dataclass(frozen=True)
class Compared:
    """A published line and our result. published, ours: by side, and `change`; ratio: of the candidates."""

    name: str
    state: str
    published: Mapping[str, str]
    ours: Mapping[str, str]
    ratio: float | None
    sentence: str


@dataclass(frozen=True)
class Order:
    """Of a column's pairs of lines whose published intervals differ: how many ours orders alike or leaves
    open, and the flipped ones."""

    column: str
    alike: int
    open: int
    flipped: tuple[str, ...]

    @property
    def state(self) -> str:
        return DIFFERS if self.flipped else AGREES if self.alike or not self.open else OPEN


@dataclass(frozen=True)
class Shape:
    rows: tuple[Compared, ...]
    orders: tuple[Order, ...]

    @property
    def exit_code(self) -> int:
        """1: a line differs or an order is flipped; 3: a line, or all of it, was not run; 4: open; else 0."""
        states, orders = {row.state for row in self.rows}, {order.state for order in self.orders}
        if DIFFERS in states | orders:
            return 1
        if NOT_RUN in states or states <= {LEFT_OUT, COMPUTED}:
            return 3
        return 4 if OPEN in states | orders else 0

    @property
    def verdict(self) -> str:
        if {row.state for row in self.rows} <= {LEFT_OUT}:
            return "kvbench has no counterpart of it"
        return _VERDICTS[self.exit_code]


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
            return f"{f'{len(cells)} cells' if cells else 'no cell'} of the run with {named or 'any keys'}"
        of_cell = [r for r in self.rows if (r.cell, r.metric) == (cells[0], metric)]
        found = next((row for row in of_cell if row.variant.startswith(variant)), None)
        if found is None:
            what = f"{metric} of {variant}" if variant else metric
            return f"the run measured no {what} on the cell with {named}"
        if found.value is None or not math.isfinite(found.value):
            return found.note or f"{metric} has no value"
        return found

    def slots(self, row: Row) -> float:
        spec = self.specs[row.cell]
        return float(spec["batch"] * -(-spec["context"] // spec["page_size"]) * spec["page_size"])

    def is_baseline(self, row: Row) -> bool:
        spec = self.specs[row.cell]
        return bool(spec["kv_format"] == spec["weights"] == "native")


def compare(lines: Sequence[Line], rules: Sequence[Rule], stand_ins: Mapping[str, str], ours: Ours) -> Shape:
    """stand_ins: our model for each published one, where a table has several."""
    columns: Columns = {}
    rows = tuple(
        _compared(line, next((r for r in rules if r.takes(line)), None), stand_ins, ours, columns)
        for line in lines
    )
    return Shape(rows, tuple(order_of(name, own) for name, own in columns.items() if len(own) > 1))


def _name(line: Line) -> str:
    scale = f"scale {line.numbers['candidate'].text}" if line.metric == "static_scale" else ""
    return ", ".join(filter(None, (line.metric, scale, line.place)))


def _published(line: Line) -> dict[str, str]:
    return {side: line.shown(side) for side in ("baseline", "candidate") if side in line.numbers}


def _without(line: Line, state: str, why: str) -> Compared:
    return Compared(_name(line), state, _published(line), {}, None, why.rstrip(".") + ".")


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
    line: Line, rule: Rule | None, stand_ins: Mapping[str, str], ours: Ours, columns: Columns
) -> Compared:
    if rule is None or rule.left_out:
        return _without(line, LEFT_OUT, rule.left_out if rule else "kvbench has no counterpart of this line")
    if rule.formula is not None:
        computed = _exact(line, {"candidate": rule.formula(line)})
        return replace(computed, state=COMPUTED) if computed.state == AGREES else computed
    found: dict[str, Row] = {}
    for side, own in (("baseline", rule.baseline), ("candidate", rule.candidate)):
        if own is not None:
            row = ours.find(_keys(rule, own, line, stand_ins), rule.ours, rule.variant)
            if isinstance(row, str):
                return _without(line, NOT_RUN, row)
            found[side] = row
    values = {
        side: (row.value or 0.0) * rule.factor / (ours.slots(row) if rule.per_token else 1.0)
        for side, row in found.items()
    }
    if rule.how == EXACT:
        return _exact(line, values)
    unit = METRICS[rule.ours].unit.name if rule.states or rule.how == SAME else line.unit
    shown = {side: _text(value, unit) for side, value in values.items()}
    if rule.how == SAME:
        state, sentence = AGREES, "the same, as published."
        if values["candidate"] != 0:
            state = DIFFERS
            sentence = f"{rule.ours} is {values['candidate']:.3g}, published are equal results."
        return Compared(_name(line), state, _published(line), shown, None, sentence)
    return _changed(line, rule, ours, found, values, shown, columns)


def _exact(line: Line, values: Mapping[str, float]) -> Compared:
    """Bytes: ours rounds to each stated side. The sentence says where a unit of 10^3 means one of 2^10."""
    state, notes, ratio = AGREES, [], None
    binary = {"KB": "KiB", "MB": "MiB", "GB": "GiB"}.get(line.unit)
    for side, value in values.items():
        if side not in line.numbers:
            continue
        stated, meant = line.numbers[side], value
        low, high = float(stated.low), float(stated.high)
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
    columns: Columns,
) -> Compared:
    name, published = _name(line), {"candidate": line.texts["note"]} if rule.states else _published(line)
    of, stated = line.texts.get("of", "candidate"), line.numbers.get("candidate")
    theirs = rule.states or ((float(stated.low), float(stated.high)) if stated else None)
    ratio = values["candidate"] / stated.middle if stated and not rule.states and stated.middle else None
    if theirs is not None and not rule.band:
        low, high = _ends(found["candidate"])
        column = rule.ours if rule.how == VALUE else f"{rule.ours} of {of}"
        columns.setdefault(column, []).append((name, theirs, (low * rule.factor, high * rule.factor)))
    claimed = stated_change(line, rule.points)
    if rule.how == VALUE or claimed is None or rule.baseline is None:
        note = "no sign is published; counted in the order" if theirs is not None else "shown only"
        return Compared(name, SHOWN, published, shown, ratio, note + ".")
    change = _change(rule, ours, found, values)
    if isinstance(change, str):
        return _without(line, NOT_RUN, change)
    if not rule.band:  # changes within a target have no order
        column = f"{rule.ours}, change of {of} against {line.texts.get('against', 'baseline')}"
        columns.setdefault(column, []).append((name, claimed, change))
    published["change"], shown["change"] = (_change_text(x, rule.points) for x in (claimed, change))
    same = "no change beyond the published target" if rule.band else "no change"
    words = {1: "up", -1: "down", 0: same, None: "either way"}
    way, own_way = (direction(x, rule.band) for x in (claimed, change))
    state, sentence = DIFFERS, f"published {words[way]}, ours {words[own_way]}"
    if way is None or own_way is None:
        state, sentence = OPEN, f"{sentence}: the intervals overlap"
    elif way == own_way:
        state, sentence = AGREES, f"both {words[way]}"
    return Compared(name, state, published, shown, ratio, sentence + ".")


def _ends(row: Row) -> Interval:
    """The interval of a row, or its value as one."""
    ends = (row.value, row.value) if row.low is None or row.high is None else (row.low, row.high)
    return float(ends[0] or 0), float(ends[1] or 0)


def _change(rule: Rule, ours: Ours, found: Mapping[str, Row], values: Mapping[str, float]) -> Interval | str:
    """Our change from baseline to candidate as log ratio or points, by paired metrics where they exist."""
    if not rule.paired:
        b, c = values["baseline"], values["candidate"]
        if not rule.points and not (b > 0 and c > 0):
            return f"{rule.ours} is not above 0"
        change = c - b if rule.points else math.log(c / b)
        return change, change
    spans: dict[str, Interval] = {}
    for side, row in found.items():
        if ours.is_baseline(row):
            spans[side] = (0.0, 0.0)
            continue
        paired = ours.find(ours.specs[row.cell], rule.paired, rule.variant)
        if isinstance(paired, str):
            return paired
        low, high = map(PAIRED[rule.paired], _ends(paired))
        spans[side] = low, high
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


def order_of(column: str, entries: Sequence[tuple[str, Interval, Interval]]) -> Order:
    """entries: (line, published, ours). Pairs with overlapping published intervals have no order."""
    alike, undecided, flipped = 0, 0, []
    for (a, theirs_a, ours_a), (b, theirs_b, ours_b) in combinations(entries, 2):
        published, found = _order(theirs_a, theirs_b), _order(ours_a, ours_b)
        if published and found == -published:
            flipped.append(f"{a} against {b}")
        elif published:
            alike += found == published
            undecided += found == 0
    return Order(column, alike, undecided, tuple(flipped))


def _order(a: Interval, b: Interval) -> int:
    return -1 if a[1] < b[0] else 1 if b[1] < a[0] else 0


def direction(change: Interval, band: float = 0.0) -> int | None:
    """-1 or 1 if the interval is entirely beyond the band, 0 if it is inside, else None."""
    low, high = change
    if -band <= low and high <= band:
        return 0
    return 1 if low > band else -1 if high < -band else None


def stated_change(line: Line, points: bool) -> Interval | None:
    """The published change from baseline to candidate, as log ratio or points: the table's claim, else by its
    two numbers; None without both."""
    numbers, faster = line.numbers, 1.0 if line.quantity.higher else -1.0

    def ends(name: str, into: Callable[[float], float]) -> Interval:
        low, high = sorted((into(float(numbers[name].low)), into(float(numbers[name].high))))
        return low, high

    ratios: dict[str, Callable[[float], float]] = {
        "ratio": math.log,
        "speedup": lambda x: faster * math.log(x),
        "compression": lambda x: -math.log(x),
        "change_pct": lambda x: math.log1p(x / 100),
        "saving_pct": lambda x: math.log1p(-x / 100),
    }
    for name, into in ({"delta_pt": float} if points else ratios).items():
        if name in numbers:
            return ends(name, into)
    if not {"baseline", "candidate"} <= numbers.keys():
        return None
    scale = float if points else math.log
    (bl, bh), (cl, ch) = ends("baseline", scale), ends("candidate", scale)
    return cl - bh, ch - bl
