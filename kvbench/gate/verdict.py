"""Outcomes of checks, each with a stable reason and a sentence, and the exit code that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

PASS, FAIL, INCONCLUSIVE, NOT_EVALUATED = "pass", "fail", "inconclusive", "not_evaluated"
NOT_JUDGED = "not_judged"  # a run without failures that no gate judged

# Why an outcome has its status. The codes are stable: results.json holds them, and tests assert them.
REASONS: dict[str, str] = {
    "kept": "the value, or its whole interval, is within the limit",
    "broken": "the value, or its whole interval, is outside the limit",
    "spans_limit": "the interval lies on both sides of the limit",
    "may_be_chance": "the interval is outside the limit, but not after the correction for several checks",
    "underpowered": "the interval is within the limit, but the sample could not show a violation",
    "skewed": "a skewed estimate passes at its last look only",
    "no_interval": "the sample is too small for an interval",
    "unstable_machine": "the state of the machine decides the outcome",
    "not_finite": "the value is NaN or infinite",
    "not_measured": "there is no value",
    "partial": "the value covers only a part, and the gate does not allow that",
    "no_cell": "the check selects no cell of the run",
    "only_baselines": "the check compares with the baseline and selects only baselines",
    "no_task": "no task of the run measures the metric on these cells",
    "nothing_evaluated": "no check of the gate was evaluated",
    "verified": "the requested precision is the effective one",
    "native_baseline": "the baseline is not native",
    "another_record": "the record belongs to another task or cell",
    "another_arm": "times belong to another arm, cell or request",
    "equal_to_native": "numbers equal native's bit for bit",
    "no_decision": "the record holds no decision",
    "no_evidence": "the record holds no evidence",
    "request_dropped": "the resolver was asked for something else than the matrix",
    "undeclared_fallback": "something else was resolved, and no fallback was declared",
    "fallback": "a declared fallback that the gate does not allow",
    "mismatch": "the evidence contradicts the resolved precision",
    "unverified": "the evidence does not show the precision",
    "no_device": "the machine lacks the device that the cells ask for",
    "differing_copies": "merged runs hold different results of a task",
    "error": "the task ended with an error",
    "refused": "the task was refused",
    "not_available": "data or software that the task needs is not here",
    "not_run": "the task did not run",
    "no_result": "the task ended well and gave no value",
    "implausible": "the value is impossible",
    "identity": "values of a cell contradict each other",
    "impossible_sides": "a health record lists sides that its store did not hold",
    "plausible": "all values are possible",
    "confounded": "the speed gain is larger than the bytes explain",
    "no_signal": "all scores or losses are alike, so they measure nothing",
    "one_choice": "every question got the same answer",
    "shard": "only a shard of the matrix was measured",
}


@dataclass(frozen=True)
class Outcome:
    """One check on one value, or one thing that no check may overlook.

    check: its name ("precision", "ppl_delta_pct within [-1, 1]"); status: pass, fail, inconclusive or
    not_evaluated; reason: a key of REASONS; cells: ids of those that share the value; metric, variant: ""
    where it is not about one; limit: in words, or ""; required: whether not_evaluated counts; why: the gate's
    explanation of the limit. mde: minimum detectable effect, the smallest distance from the limit of a true
    value that so much data decides (80% power, at 1 - level), in the value's unit; infinite where no possible
    value is far enough. n_needed: how many samples, of the kind that the value's n counts, would decide at
    what was observed; None where that is unknown, or no number would. look, level: "look 1 of 3" and its
    confidence, where a sample was judged as it grew. bounds: the closed interval that the value has to keep;
    None where the check is no limit on a number.
    """

    check: str
    status: str
    reason: str
    sentence: str
    cells: tuple[str, ...] = ()
    metric: str = ""
    variant: str = ""
    value: float | None = None
    limit: str = ""
    required: bool = True
    why: str = ""
    mde: float | None = None
    n_needed: int | None = None
    look: str = ""
    level: float | None = None
    bounds: tuple[float, float] | None = None
    cell: str | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cell", self.cells[0] if self.cells else None)


@dataclass(frozen=True)
class Verdict:
    """All outcomes, the unremovable checks first. whole: False for a share of a matrix."""

    outcomes: tuple[Outcome, ...]
    exit_code: int
    whole: bool = True

    @property
    def word(self) -> str:
        """The exit code as the status that decided it; 0 is no pass of a share."""
        passed = PASS if self.whole else NOT_EVALUATED
        return {0: passed, 1: FAIL, 4: INCONCLUSIVE}.get(self.exit_code, NOT_EVALUATED)


def exit_code_of(outcomes: Iterable[Outcome], whole: bool = True) -> int:
    """1 a failure; else 3 something required was not evaluated (or nothing was at all); else 4 inconclusive;
    else 0. Of a share, where other shards may still decide: 1, else 3 where its own tasks gave no result."""
    kept = list(outcomes)
    statuses = {o.status for o in kept}
    if FAIL in statuses:
        return 1
    if any(o.status == NOT_EVALUATED and o.required for o in kept):
        return 3
    if whole and not statuses - {NOT_EVALUATED}:
        return 3
    return 4 if whole and INCONCLUSIVE in statuses else 0
