"""The result of a comparison with a published table: signs, orders, and the verdict over all lines."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvbench.published.table import Line

AGREES, DIFFERS, OPEN, SHOWN, NOT_RUN, LEFT_OUT = "agrees", "differs", "open", "shown", "not run", "left out"
COMPUTED = "computed from the published numbers"  # not measured, so no agreement

Interval = tuple[float, float]


@dataclass(frozen=True)
class Compared:
    """One published line and our result. published, ours: by side, and `change`; ratio: ours over the
    published candidate.
    """

    name: str
    state: str
    published: Mapping[str, str]
    ours: Mapping[str, str]
    ratio: float | None
    sentence: str


@dataclass(frozen=True)
class Order:
    """A column's pairs of lines whose published intervals differ: the number ordered alike and left open by
    ours, and the flipped pairs.
    """

    column: str
    alike: int
    open: int
    flipped: tuple[str, ...]

    @property
    def state(self) -> str:
        """A flipped pair means differs, a pair alike agrees; only open pairs are open."""
        return DIFFERS if self.flipped else AGREES if self.alike or not self.open else OPEN


@dataclass(frozen=True)
class Shape:
    rows: tuple[Compared, ...]
    orders: tuple[Order, ...]

    @property
    def exit_code(self) -> int:
        """1: a line differs or an order is flipped; 3: a line was not run, or none could be; 4: open; 0: the
        shape agrees.
        """
        states = {row.state for row in self.rows}
        orders = {order.state for order in self.orders}
        if DIFFERS in states | orders:
            return 1
        if NOT_RUN in states or states <= {LEFT_OUT, COMPUTED}:
            return 3
        return 4 if OPEN in states | orders else 0

    @property
    def verdict(self) -> str:
        if {row.state for row in self.rows} <= {LEFT_OUT}:
            return "kvbench has no counterpart of it"
        words = {
            0: "the shape agrees",
            1: "the shape differs",
            3: "not all of it was run",
            4: "the data cannot tell",
        }
        return words[self.exit_code]


def order_of(column: str, entries: Sequence[tuple[str, Interval, Interval]]) -> Order:
    """The order of a column. entries: (line, published, ours); pairs with overlapping published intervals
    have none.
    """
    alike, undecided, flipped = 0, 0, []
    for (a, theirs_a, ours_a), (b, theirs_b, ours_b) in combinations(entries, 2):
        published, found = _order(theirs_a, theirs_b), _order(ours_a, ours_b)
        if published == 0:
            continue
        if found == 0:
            undecided += 1
        elif found == published:
            alike += 1
        else:
            flipped.append(f"{a} against {b}")
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
    """The published change from baseline to candidate: the table's claim, else by its two numbers; None
    without both.
    """
    numbers = line.numbers

    def ends(name: str, into: Callable[[float], float]) -> Interval:
        low, high = into(float(numbers[name].low)), into(float(numbers[name].high))
        return (low, high) if low <= high else (high, low)

    faster = 1.0 if line.quantity.higher else -1.0
    claims: dict[str, Callable[[float], float]] = (
        {"delta_pt": float}
        if points
        else {
            "ratio": math.log,
            "speedup": lambda x: faster * math.log(x),
            "compression": lambda x: -math.log(x),
            "change_pct": lambda x: math.log1p(x / 100),
            "saving_pct": lambda x: math.log1p(-x / 100),
        }
    )
    for name, into in claims.items():
        if name in numbers:
            return ends(name, into)
    if not {"baseline", "candidate"} <= numbers.keys():
        return None
    into = float if points else math.log
    (bl, bh), (cl, ch) = ends("baseline", into), ends("candidate", into)
    return cl - bh, ch - bl
