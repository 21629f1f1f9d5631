"""A candidate format with everything that a run has about it, and the shape of an answer about it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS, Outcome
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS, Row
from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED, Shown, counted_of, one_line, shown_row
from kvbench.report.model import JudgedRun
from kvbench.report.sections.precision import PrecisionLine

COST = ("storage", "transfer", "latency")  # runners of savings; all others are about safety
WEAKEST = "weakest: "
_HOLDS = {PASS: "passed", FAIL: "failed", INCONCLUSIVE: "inconclusive"}
SENTENCE_LIMIT = 400
# Errors as a share of the rounding bound: they are close to 1 wherever rounding is used in full.
_BOUNDS = frozenset({"health_bound_share", "parity_bound_share", "gemm_bound_share"})

# Each reason with its answer in a few words and its tone: pass, fail, inconclusive, partial, incomplete or
# info.
REASONS = {
    # Is it really running?
    "verified": ("yes", "pass"),
    "precision_lost": ("no", "fail"),
    "fell_back": ("no", "fail"),
    "precision_check_failed": ("not proven", "fail"),
    "no_evidence": (NOT_MEASURED, "incomplete"),
    "unproven": ("not proven", "incomplete"),
    "verified_in_part": ("partly proven", "partial"),
    # Is it safe?
    "passed": ("yes", "pass"),
    "passed_on_part": ("yes, on part of the data", "partial"),
    "tensors_only": ("partly", "partial"),
    "plumbing": ("not shown", "incomplete"),
    "random_weights": (NOT_MEASURED, "incomplete"),
    "no_limit": ("not judged", "incomplete"),
    "nothing_measured": (NOT_MEASURED, "incomplete"),
    # Is it worth it?
    "smaller_and_faster": ("yes", "pass"),
    "smaller": ("smaller, speed undecided", "partial"),
    "smaller_speed_unknown": ("smaller, speed not measured", "partial"),
    "smaller_but_slower": ("smaller but slower", "partial"),
    "faster_only": ("faster", "partial"),
    "mixed": ("partly", "partial"),
    "neither": ("no", "fail"),
    "undecided": ("undecided", "inconclusive"),
    # Safe or worth it
    "check_failed": ("no", "fail"),
    "inconclusive": ("undecided", "inconclusive"),
    "result_missing": ("not shown", "incomplete"),
    "baseline_failed": ("not shown", "inconclusive"),
    "not_what_was_requested": ("not shown", "incomplete"),
    # What would change the verdict?
    "fix_failures": ("a fix", "info"),
    "add_results": ("the missing results", "info"),
    "add_data": ("more data", "info"),
    "add_gate": ("a gate", "info"),
    "exact_limits": ("a changed value", "info"),
    "weakest_check": ("the weakest check", "info"),
}


@dataclass(frozen=True)
class Candidate:
    """name: as the card shows it; kv_format, weights: as requested; cells, baselines: their ids."""

    name: str
    kv_format: str
    weights: str
    cells: tuple[str, ...]
    baselines: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A number that supports an answer. name: its metric or meaning; where: its cell, None for all cells."""

    name: str
    shown: Shown
    where: Label | None = None
    variant: str = ""
    note: str = ""

    @property
    def counted(self) -> str:
        """What its n counts, or ""."""
        metric = METRICS.get(self.name.removeprefix(WEAKEST))
        return counted_of(1 if self.shown.n == "n = 1" else 2, metric.counted) if metric else ""


@dataclass(frozen=True)
class Answer:
    """reason: a key of REASONS; sentence: the reason in full; points: further sentences."""

    reason: str
    sentence: str
    figures: tuple[Figure, ...] = ()
    points: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The answer in a few words."""
        return REASONS[self.reason][0]

    @property
    def tone(self) -> str:
        return REASONS[self.reason][1]


@dataclass(frozen=True)
class Case:
    """A candidate with its part of the run.

    own: outcomes on its cells; related: outcomes on its baselines only, or on no cell; blockers: why the run
    cannot be a release.
    """

    run: JudgedRun
    candidate: Candidate
    lines: tuple[PrecisionLine, ...]
    own: tuple[Outcome, ...]
    related: tuple[Outcome, ...]
    blockers: tuple[str, ...]

    def about(self, outcomes: Iterable[Outcome], cost: bool) -> list[Outcome]:
        """The outcomes on savings (cost) or on safety, without those of the precision check."""
        return [o for o in outcomes if o.check != "precision" and (runner_of(o) in COST) == cost]

    def rows(self, metric: str) -> list[Row]:
        """The measured rows of a metric on the candidate's cells."""
        cells = self.candidate.cells
        return [r for r in self.run.rows if r.metric == metric and r.cell in cells and r.value is not None]

    def row_of(self, outcome: Outcome) -> Row | None:
        rows = {(r.metric, r.variant): r for r in self.run.rows if r.cell in outcome.cells}
        return rows.get((outcome.metric, outcome.variant)) if outcome.metric else None

    def sentence(self, outcome: Outcome) -> str:
        """The outcome in a sentence, shortened for a limit on a number; the table of checks has all of it."""
        row = self.row_of(outcome)
        if row and row.value is not None and outcome.bounds and outcome.status in _HOLDS:
            name = one_line(f"{row.metric} of {row.variant}" if row.variant else row.metric, 120)
            where = self.run.labels.subject(runner_of(outcome), row.cell).text
            limit = f"limit {one_line(outcome.limit)}: {_HOLDS[outcome.status]}"
            return f"{name} is {shown_row(row).brief} on {where}; {limit}."
        return one_line(self.run.labels.unnamed(outcome.sentence, outcome.cells), SENTENCE_LIMIT)

    def any_cell(self, key: str, value: Any) -> bool:
        """Whether some cell of the candidate has this value of a key."""
        return any(self.run.run.cells[cell].spec.get(key) == value for cell in self.candidate.cells)


def runner_of(outcome: Outcome) -> str:
    """The runner whose result an outcome judges, or ""; the sentence on a whole task begins with it."""
    if outcome.metric:
        return METRICS[outcome.metric].runner if outcome.metric in METRICS else ""
    first = outcome.sentence.partition(" ")[0]
    return first if first in RUNNERS else ""


@dataclass(frozen=True)
class Margin:
    """The distance of a value to its limit, on one scale for all metrics.

    used: the share of the distance from the best possible value to the limit that the interval covers: 0 at
    the best value, 1 at the limit. bound: the end of the 95% interval next to the limit, or the value. limit:
    the end of the allowed interval that counts. best: the best possible value, None for a metric without one.
    """

    used: float
    bound: float
    limit: float
    best: float | None

    @property
    def distance(self) -> float:
        return abs(self.limit - self.bound)


def margin(row: Row, bounds: tuple[float, float] | None) -> Margin | None:
    """The margin of a row to its limit; None without a value or a limit, or with an exact limit."""
    if row.value is None or not math.isfinite(row.value) or row.metric in _BOUNDS:
        return None
    if bounds is None or bounds[0] == bounds[1]:
        return None
    low = row.value if row.low is None else row.low
    high = row.value if row.high is None else row.high
    sides = [_side(row, end, bound, bounds) for end, bound in zip(bounds, (low, high), strict=True)]
    return max((side for side in sides if side), key=lambda side: side.used, default=None)


def _side(row: Row, limit: float, bound: float, bounds: tuple[float, float]) -> Margin | None:
    if not (math.isfinite(limit) and math.isfinite(bound)):
        return None
    # The best value: no change if the limit allows it, else the end of the unit's domain.
    metric = METRICS.get(row.metric)
    best = metric.none if metric else None
    if best is None or not bounds[0] <= best <= bounds[1]:
        best = row.unit.low if limit == bounds[1] else row.unit.high
        if all(map(math.isfinite, bounds)):
            best = (bounds[0] + bounds[1]) / 2
    if not math.isfinite(best):  # a rate has no largest value, so the ratio of limit and value counts
        return Margin(limit / bound, bound, limit, None) if limit > 0 and bound > 0 else None
    if best == limit:
        return None  # no value is beyond it: a share of at most 1
    return Margin((bound - best) / (limit - best), bound, limit, best)


def nearest(case: Case, outcomes: Sequence[Outcome]) -> tuple[Outcome, Margin] | None:
    """The outcome closest to its limit; None where every limit is exact."""
    rows = [(o, row) for o in outcomes if (row := case.row_of(o))]
    found = [(o, near) for o, row in rows if (near := margin(row, o.bounds))]
    return max(found, key=lambda pair: pair[1].used, default=None)


def weakest(case: Case, outcomes: Sequence[Outcome]) -> tuple[Figure, ...]:
    """The value of the outcome closest to its limit, or of the first outcome with a value."""
    near = nearest(case, outcomes)
    outcome = near[0] if near else next((o for o in outcomes if case.row_of(o)), None)
    row = case.row_of(outcome) if outcome else None
    if outcome is None or row is None:
        return ()
    note = f"limit {one_line(outcome.limit)}"
    if near and near[1].best is not None and near[1].used <= 1:
        note += f"; {100 * near[1].used:.3g}% of the margin used"
    where = case.run.labels.subject(runner_of(outcome), row.cell)
    name = f"{WEAKEST}{row.metric}" if len(outcomes) > 1 else row.metric
    return (Figure(name, shown_row(row), where, one_line(row.variant, 120), note),)


def others(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """The point that counts all outcomes but the first."""
    n = len(outcomes) - 1
    return (f"{n} more, see the checks below.",) if n else ()


def all_cells(n: int) -> str:
    return {1: "its only cell", 2: "both cells"}.get(n, f"all {n} cells")
