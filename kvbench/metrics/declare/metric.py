"""What the metric files declare: tables of metrics, and the change of a metric between two runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.metrics.declare.units import Unit
from kvbench.records.record import Record


class Measured(NamedTuple):
    """A record, and its baseline's (None: it is the baseline itself, or its baseline has no result)."""

    record: Record
    native: Record | None


@dataclass(frozen=True)
class Kind:
    """A kind of change. margin: how far two runs may differ and still count as the same, in % of a ratio or
    points of a share (docs/comparing.md gives the reasons); more, less: words for a change up and down."""

    name: str
    margin: float
    more: str = "higher"
    less: str = "lower"


BESIDE = Kind("time beside native", 2.0, "slower", "faster")
ALONE = Kind("time", 10.0, "slower", "faster")
RATE = Kind("time", 10.0, "faster", "slower")
TEXT = Kind("perplexity", 0.5)
DIVERGENCE = Kind("KLD", 10.0)
AGREEMENT = Kind("share", 0.5)
EXACT = Kind("bytes", 0.0, "more", "less")

# The margin of each kind by name; `time` has two kinds that differ only in their words.
MARGINS = {kind.name: kind.margin for kind in (BESIDE, ALONE, TEXT, DIVERGENCE, AGREEMENT, EXACT)}


@dataclass(frozen=True)
class Effect:
    """The change of a metric from one run to another.

    unit: "%" of a ratio, 100 * (second / first - 1), "pt" of a share, else the metric's own. n: samples in
    each run (the fewer), of what `counted` names; units: as in `collect.Row`. identical: to the last bit.
    method: in words. beside: of times, the change without the native arm. subset: what both runs have.
    """

    metric: str
    kind: Kind
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    counted: str = ""
    units: float | None = None
    identical: bool = False
    method: str = ""
    beside: Effect | Unable | None = None
    subset: str = ""

    @property
    def sampled(self) -> bool:
        return self.kind is not EXACT


@dataclass(frozen=True)
class Unable:
    """A metric whose samples cannot be paired, and why."""

    metric: str
    why: str


@dataclass(frozen=True)
class Metric:
    """One metric: what its numbers mean and how they are judged.

    better: "lower", "higher" or "" (neither). heading: of its column. plausible: closed interval outside
    which a value is a fault; None: the unit's. paired: a difference from the baseline, so baseline cells have
    no such row. sampled: judged only with an interval. none: the value that means no change. brief: a console
    has room for it. effect: how its change between two runs is estimated; None: shown, not judged by
    `kvbench compare`. runner, counted: set by its table."""

    name: str
    unit: Unit
    better: str
    heading: str
    definition: str
    plausible: tuple[float, float] | None = None
    paired: bool = False
    sampled: bool = False
    none: float | None = None
    brief: bool = False
    effect: Callable[[Metric, Measured, Measured], Effect | Unable | None] | None = None
    runner: str = ""
    counted: str = ""

    @property
    def range(self) -> tuple[float, float]:
        return self.plausible or self.unit.range


@dataclass(frozen=True)
class Table:
    """Metrics that a report shows in one table, in the order of its columns. key: anchor on the page; note:
    how to read it; footnote: shown on a console instead; counted: what the n of its values counts; facts:
    whether the runner's facts are listed below; over: the cell key that a value spans."""

    key: str
    title: str
    metrics: tuple[Metric, ...]
    note: str
    footnote: str = ""
    counted: str = ""
    facts: bool = True
    over: str = ""
    runner: str = ""
