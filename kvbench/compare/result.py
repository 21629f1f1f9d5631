"""The findings of a comparison of stored runs as sentences, and its exit code."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.compare.pairing import Stored
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.metric import EXACT, Effect, Unable
from kvbench.render.numbers import counted_of, one_line

# As `kvbench.compare.two_runs` describes them.
WORSE, BETTER, SAME, UNDECIDED = "worse", "better", "same", "undecided"
NOT_EVALUATED, NOT_JUDGED = "not_evaluated", "not_judged"


@dataclass(frozen=True)
class Finding:
    """The finding for one metric on one task of two runs. mde, n_needed: as in `verdict.Outcome`."""

    runs: tuple[str, str]
    metric: str  # "" where the whole task has no result
    runner: str
    variant: str
    cell: str  # its id in the first run
    place: str  # the cells in words
    cells: tuple[str, ...]
    outcome: str
    reason: str
    first: Row | None = None  # the metric's value in each run
    second: Row | None = None
    effect: Effect | None = None
    margin: float | None = None
    adjusted: float | None = None  # p-value of the margin after Holm over `family` changes
    family: int = 1
    mde: float | None = None
    n_needed: int | None = None
    partial: str = ""

    @property
    def subject(self) -> str:
        words = (self.metric or self.runner, self.variant)
        return (" of " if self.metric else " ").join(filter(None, words))

    @property
    def sentence(self) -> str:
        """`int8_sym batch 1 context 512: itl_ms is 5.1% slower [3.9, 6.3], 10 pairs: worse.`"""
        at, effect = f"{self.place}: {self.subject}", self.effect
        if effect is None:
            not_compared = " was not compared" if self.outcome == NOT_EVALUATED else ""
            return one_line(f"{at}{not_compared}: {self.reason}.")
        parts = [spoken(effect)]
        parts += [f"{effect.n:,} {counted_of(effect.n, effect.counted)}"] if effect.n is not None else []
        parts += [f"by itself {spoken(effect.beside)}"] if effect.beside else []
        word = {SAME: "the same"}.get(self.outcome, self.outcome)
        reason = f" ({self.reason})" if self.reason else ""
        partial = f", partial: {self.partial}" if self.partial else ""
        return one_line(f"{at} is {', '.join(parts)}: {word}{reason}{partial}.")


@dataclass(frozen=True)
class Comparison:
    """runs: the first is the reference; faults: (run, sentence) of failures within one run; named:
    differences that do not prevent the comparison, and what only one run has."""

    runs: tuple[Stored, ...]
    faults: tuple[tuple[str, str], ...]
    named: tuple[str, ...]
    findings: tuple[Finding, ...]
    margin: float | None = None
    exit_code: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exit_code", exit_code_of(self.faults, self.findings))

    @property
    def word(self) -> str:
        return {0: "nothing is worse", 1: "worse", 4: "undecided"}.get(self.exit_code, "not evaluated")


def exit_code_of(faults: Sequence[object], findings: Sequence[Finding]) -> int:
    """1: something is worse or a run is invalid; 3: something, or all, was not evaluated; 4: undecided; 0."""
    found = {finding.outcome for finding in findings}
    if faults or WORSE in found:
        return 1
    if NOT_EVALUATED in found or not found & {SAME, BETTER, UNDECIDED}:
        return 3
    return 4 if UNDECIDED in found else 0


def spoken(effect: Effect | Unable) -> str:
    """`5.1% slower [3.9, 6.3]`; the interval has the sign of the word."""
    if isinstance(effect, Unable):
        return f"not compared ({effect.why})"
    more, less = effect.kind.more, effect.kind.less
    if not math.isfinite(effect.value):
        return "not a number"
    up = effect.value >= 0
    if effect.kind is EXACT:
        size = f"{abs(effect.value):,.10g} {effect.unit}"
        return f"{size} {more if up else less}" if effect.value else "unchanged"
    ends = sorted(e if up else -e for e in (effect.low, effect.high) if e is not None)
    width, digits = ends[1] - ends[0] if ends else abs(effect.value), 1
    if 0 < width < math.inf:  # two digits of the interval's width
        digits = min(8, max(1 if width < 100 else 0, 1 - math.floor(math.log10(width))))
    unit = "%" if effect.unit == "%" else f" {effect.unit}"
    interval = f" [{', '.join(f'{e:,.{digits}f}' for e in ends)}]" if ends else ""
    if effect.value == 0:
        return f"unchanged{interval and interval + unit}"
    return f"{abs(effect.value):,.{digits}f}{unit} {more if up else less}{interval}"
