"""A candidate format with all that a run says of it, and the shapes of an answer about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS, Row
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import Shown, counted_of, one_line, shown_row
from kvbench.report.model import JudgedRun, OutcomeLike
from kvbench.report.sections.precision import PrecisionLine
from kvbench.report.sections.room import Room, room
from kvbench.report.sections.tables import limit_text

COST = (
    "storage",
    "transfer",
    "latency",
)  # runners whose checks are about what is gained; all others are about safety
WEAKEST = "weakest: "
_WORDS = {"pass": "kept", "fail": "broken", "inconclusive": "undecided"}
SENTENCE_LIMIT = 400


@dataclass(frozen=True)
class Candidate:
    """name: as the card says it; kv_format, weights: as requested; cells: their ids; baselines: those of the cells that they are
    compared with."""

    name: str
    kv_format: str
    weights: str
    cells: tuple[str, ...]
    baselines: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A number behind an answer. name: its metric or what it is; where: the cell it is of, None for all; note: how to read it."""

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
    """word: the answer in a word or two; tone: pass, fail, inconclusive, partial or incomplete; sentence: why; points: what
    stands beside it, one sentence each."""

    question: str
    word: str
    tone: str
    sentence: str
    figures: tuple[Figure, ...] = ()
    points: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A candidate with what the run has of it. own: outcomes on its cells; beside: on its baselines alone, or on no cell."""

    run: JudgedRun
    labels: Labels
    candidate: Candidate
    lines: tuple[PrecisionLine, ...]
    own: tuple[OutcomeLike, ...]
    beside: tuple[OutcomeLike, ...]
    held: tuple[str, ...]

    def about(self, outcomes: Iterable[OutcomeLike], cost: bool) -> list[OutcomeLike]:
        """Those on what is gained, or those on safety; precision has an answer of its own."""
        return [o for o in outcomes if o.check != "precision" and (runner_of(o) in COST) == cost]

    def rows(self, metric: str) -> list[Row]:
        return [
            r
            for r in self.run.rows
            if r.metric == metric and r.cell in self.candidate.cells and r.value is not None
        ]

    def row_of(self, outcome: OutcomeLike) -> Row | None:
        at = {(r.metric, r.variant): r for r in self.run.rows if r.cell in outcome.cells}
        return at.get((outcome.metric, outcome.variant))

    def said(self, outcome: OutcomeLike) -> str:
        """The outcome in a sentence, a short one where a limit was set against a number: the table of checks has the whole."""
        row = self.row_of(outcome) if outcome.metric else None
        if row and row.value is not None and outcome.bounds and outcome.status in _WORDS:
            name = one_line(f"{row.metric} of {row.variant}" if row.variant else row.metric, 120)
            where = self.labels.subject(runner_of(outcome), row.cell).text
            value = f"{name} is {shown_row(row).brief} on {where}"
            return f"{value}; the limit is {limit_text(outcome.limit)}: {_WORDS[outcome.status]}."
        return one_line(self.labels.unnamed(outcome.sentence, outcome.cells), SENTENCE_LIMIT)

    @property
    def specs(self) -> list[dict[str, object]]:
        return [dict(self.labels.cells[cell].spec) for cell in self.candidate.cells]


def runner_of(outcome: OutcomeLike) -> str:
    """The runner whose result it is about; "" of none. An outcome of a whole task begins with its runner's name."""
    if outcome.metric:
        return METRICS[outcome.metric].runner if outcome.metric in METRICS else ""
    first = outcome.sentence.partition(" ")[0]
    return first if first in RUNNERS else ""


def nearest(case: Case, outcomes: Sequence[OutcomeLike]) -> tuple[OutcomeLike, Room] | None:
    found = []
    for outcome in outcomes:
        row = case.row_of(outcome)
        at = room(row, outcome.bounds) if row else None
        if at is not None:
            found.append((outcome, at))
    return max(found, key=lambda pair: pair[1].used, default=None)


def weakest(case: Case, outcomes: Sequence[OutcomeLike]) -> tuple[Figure, ...]:
    """The value of the weakest of these checks, or of the first where none is near a limit."""
    near = nearest(case, outcomes)
    outcome = near[0] if near else next((o for o in outcomes if case.row_of(o)), None)
    row = case.row_of(outcome) if outcome else None
    if outcome is None or row is None:
        return ()
    limit = f"limit {limit_text(outcome.limit)}"
    used = (
        f"; {100 * near[1].used:.3g}% of the room to it is used"
        if near and near[1].best is not None and near[1].used <= 1
        else ""
    )
    where = case.labels.subject(runner_of(outcome), row.cell)
    name = f"{WEAKEST}{row.metric}" if len(outcomes) > 1 else row.metric
    return (Figure(name, shown_row(row), where, one_line(row.variant, 120), limit + used),)


def more(outcomes: Sequence[OutcomeLike]) -> tuple[str, ...]:
    n = len(outcomes) - 1
    return (f"And {n} more like it, below.",) if n else ()


def count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def all_cells(n: int) -> str:
    return {1: "its only cell", 2: "both cells"}.get(n, f"all {n} cells")
