"""What a gate says: outcomes with a sentence each, and the exit code that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PASS, FAIL, INCONCLUSIVE, NOT_EVALUATED = "pass", "fail", "inconclusive", "not_evaluated"
NOT_JUDGED = "not_judged"  # of a run without failures that no gate judged


@dataclass(frozen=True)
class Outcome:
    """One check on one value, or one thing that no check may overlook.

    check: its name ("precision", "cell error", "ppl_delta_pct within [-1, 1]"); metric, variant: "" where it is not
    about one; cell: id of the cell, or of the first of `cells` when several share the value, or None;
    status: pass, fail, inconclusive or not_evaluated; limit: in words ("at most 0.01"), or "";
    required: whether not_evaluated counts; why: the policy's reason for the limit.
    mde: minimum detectable effect, the smallest distance from the limit of a true value that so much data decides (80% power,
    5%), in the value's unit; infinite where no possible value is far enough; None where nothing is estimated.
    n_needed: how many samples, of the kind that the value's n counts, would decide at what was observed; None where that
    is unknown, or no number would.
    bounds: the limit as numbers, the closed interval that the value has to keep (one end infinite for a one-sided limit); None
    where the check is no limit on a number.
    look, level: "look 1 of 3" and the confidence at which it was judged, where a sample was judged as it grew; the 5% of `mde` is 1 -
    level then.
    """

    check: str
    metric: str
    cell: str | None
    variant: str
    status: str
    value: float | None
    limit: str
    sentence: str
    required: bool = True
    why: str = ""
    cells: tuple[str, ...] = ()
    mde: float | None = None
    n_needed: int | None = None
    look: str = ""
    level: float | None = None
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Verdict:
    """All outcomes, the unremovable checks first. exit_code: see `exit_code_of`; of a share of a matrix (whole: False) the one of
    `kvbench.records.shards`, where 0 is no pass."""

    outcomes: tuple[Outcome, ...]
    exit_code: int
    whole: bool = True

    @property
    def word(self) -> str:
        """The exit code as the status that decided it."""
        passed = PASS if self.whole else NOT_EVALUATED
        return {0: passed, 1: FAIL, 4: INCONCLUSIVE}.get(self.exit_code, NOT_EVALUATED)


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """1 a failure; else 3 something required was not evaluated (or nothing was at all); else 4 inconclusive; else 0."""
    kept = list(outcomes)
    statuses = {o.status for o in kept}
    if FAIL in statuses:
        return 1
    if not statuses - {NOT_EVALUATED} or any(o.status == NOT_EVALUATED and o.required for o in kept):
        return 3
    return 4 if INCONCLUSIVE in statuses else 0
