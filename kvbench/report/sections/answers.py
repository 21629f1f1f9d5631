"""Whether a candidate format is running, whether it is safe, and what would change the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isinf

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome
from kvbench.metrics.collect import METRICS
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, RUNGS, UNVERIFIED, VERIFIED, rung
from kvbench.render.labels import Labels
from kvbench.render.numbers import NOT_MEASURED, Shown, one_line, shown_row
from kvbench.report.model import JudgedRun
from kvbench.report.sections.candidate import (
    COST,
    SENTENCE_LIMIT,
    Answer,
    Candidate,
    Case,
    Figure,
    all_cells,
    nearest,
    others,
    runner_of,
    weakest,
)
from kvbench.report.sections.gains import worth
from kvbench.report.sections.precision import PrecisionLine
from kvbench.report.sections.wording import count, mde_text, needed_text

_TEXT = ("agreement", "generate", "perplexity", "mcq")  # runners of text that the model reads or writes
_MOST = 4  # points of an answer

# What each level of evidence shows.
_SHOWS = {
    "E1": "dtypes and bytes of the live tensors",
    "E2": "stored codes equal to the reference quantizer's",
    "E3": "what is stored is what is read",
    "E4": "the kernels that ran",
    "E5": "output that differs from native within the format's bound",
}


def answers(
    run: JudgedRun,
    labels: Labels,
    precision: Sequence[PrecisionLine],
    candidate: Candidate,
    blockers: Sequence[str],
) -> tuple[Answer, ...]:
    """The answers to the card's questions, in order. blockers: why the whole run cannot be a release."""
    cells, baselines = set(candidate.cells), set(candidate.baselines)
    own = tuple(o for o in run.verdict.outcomes if cells & set(o.cells))
    rest = (o for o in run.verdict.outcomes if not cells & set(o.cells))
    related = tuple(o for o in rest if not o.cells or baselines & set(o.cells))
    lines = tuple(line for line in precision if line.label.cells[0] in cells)
    case = Case(run, labels, candidate, lines, own, related, tuple(blockers))
    runs = running(case)
    return runs, _of_what_ran(runs, safe(case)), _of_what_ran(runs, worth(case)), change(case)


def _of_what_ran(runs: Answer, answer: Answer) -> Answer:
    """A good answer counts only if the requested format is what ran."""
    if runs.tone in ("pass", "partial") or answer.tone in ("fail", "incomplete"):
        return answer
    doubt = "It is not proven that the requested format ran, so these numbers may be of another."
    return Answer("not_what_was_requested", f"{doubt} {answer.sentence}", answer.figures, answer.points)


def running(case: Case) -> Answer:
    """Whether the requested precision ran, by the evidence of every cell and the precision check."""
    cells = count(len(case.lines), "cell")
    figures = (_reads(case.lines),) if case.candidate.kv_format != "native" else ()
    checks = [o for o in case.own if o.check == "precision"]
    lost = next((line for line in case.lines if line.state == MISMATCH), None)
    fell = next((choice for line in case.lines for choice in line.choices if choice.fell_back), None)
    if failed := [o for o in checks if o.status == FAIL]:
        reason = "precision_lost" if lost else "fell_back" if fell else "precision_check_failed"
        return Answer(reason, case.sentence(failed[0]), figures, others(failed))
    if lost:
        levels = [level.sentence for level in lost.levels if level.state == MISMATCH]
        sentence = levels[0] if levels else f"{lost.kv.resolved} was resolved, but {lost.effective} ran."
        return Answer("precision_lost", sentence, figures)
    if fell:
        sentence = f"{fell.aspect} {fell.requested} was requested, but {fell.resolved} ran: {fell.reason}"
        return Answer("fell_back", sentence, figures)
    unproven = [line for line in case.lines if line.state == UNVERIFIED and not _reached(line)]
    open_ = next((o for o in checks if o.status != PASS), None)
    if unproven:
        silent = len(unproven) == len(case.lines) and not any(line.levels for line in unproven)
        sentence = f"In {len(unproven)} of {cells} no evidence shows which precision ran."
        return Answer("no_evidence" if silent else "unproven", sentence, figures)
    if open_:
        return Answer("unproven", case.sentence(open_), figures)
    least = min((_reached(line) for line in case.lines), default="")
    shown = Shown(least or "none", n=f"in {len(case.lines)} of {cells}")
    figures = (Figure("evidence level", shown, note=_SHOWS.get(least, "")), *figures)
    sentence = f"{case.candidate.name} was requested, resolved and run in {all_cells(len(case.lines))}."
    if any(line.state == UNVERIFIED for line in case.lines):
        sentence += f" The evidence above {least} proves nothing, which the gate allows."
        return Answer("verified_in_part", sentence, figures)
    return Answer("verified", sentence, figures)


def _reads(lines: Iterable[PrecisionLine]) -> Figure:
    """Tokens that were read from quantized pages, each record counted once."""
    reads = {read for line in lines for read in line.reads}
    quantized, tokens = sum(read[2] for read in reads), sum(read[1] for read in reads)
    shown = Shown(f"{quantized:,} of {tokens:,} tokens") if tokens else Shown(NOT_MEASURED, state="missing")
    return Figure("read from quantized pages", shown)


def _reached(line: PrecisionLine) -> str:
    """The highest evidence level up to which all applicable levels are verified, or ""."""
    best = ""
    for step in RUNGS:
        states = {level.state for level in line.levels if rung(level.name) == step} - {NOT_APPLICABLE}
        if states - {VERIFIED}:
            break
        best = step if states else best
    return best


def safe(case: Case) -> Answer:
    """Whether quality holds, by all checks that are not about savings."""
    checks = case.about(case.own, cost=False)
    if failed := [o for o in checks if o.status == FAIL]:
        return Answer("check_failed", case.sentence(failed[0]), weakest(case, failed[:1]), others(failed))
    if case.any_cell("model_weights", "random"):
        return Answer("random_weights", "The weights are random, so quality numbers are meaningless.")
    judged = [o for o in checks if o.metric and o.status != NOT_EVALUATED]
    missing = [o for o in checks if o.status == NOT_EVALUATED and o.required]
    figures = weakest(case, judged)
    if missing and not judged:
        return Answer("result_missing", case.sentence(missing[0]), (), others(missing))
    if not judged and _measured_text(case):
        return Answer("no_limit", "Quality was measured, but no check compares it with a limit.")
    if not judged:
        return Answer("nothing_measured", "No quality check has a result.")
    if failed := [o for o in case.related if o.status == FAIL and runner_of(o) not in COST]:
        return Answer("baseline_failed", f"The baseline failed: {case.sentence(failed[0])}")
    if open_ := [o for o in checks if o.status == INCONCLUSIVE]:
        sentence = f"{len(open_)} of {len(judged)} quality checks undecided: {case.sentence(open_[0])}"
        return Answer("inconclusive", sentence, weakest(case, open_[:1]), others(open_))
    if missing:
        return Answer("result_missing", case.sentence(missing[0]), figures, others(missing))
    passed = f"{count(len(judged), 'quality check')} passed"
    if not any(runner_of(o) in _TEXT for o in judged):
        sentence = f"{passed}, but all are on tensors; no text that the model reads or writes was judged."
        return Answer("tensors_only", sentence, figures)
    if case.any_cell("plumbing", True):
        return Answer(
            "plumbing", f"{passed}, but a plumbing test does not measure a model's quality.", figures
        )
    if any(row and row.partial for row in map(case.row_of, judged)):
        return Answer("passed_on_part", f"{passed}, some on part of the data only.", figures)
    return Answer("passed", f"{passed}.", figures)


def _measured_text(case: Case) -> bool:
    rows = (r for r in case.run.rows if r.metric in METRICS and r.cell in case.candidate.cells)
    return any(r.value is not None and METRICS[r.metric].runner in _TEXT for r in rows)


def change(case: Case) -> Answer:
    """What would change the verdict: a fix, missing results, more data, or a value beyond its limit."""
    outcomes = [*case.own, *case.related]
    if failed := [o for o in outcomes if o.status == FAIL]:
        points = _first(_fix(case, o) for o in _by_check(failed))
        return Answer("fix_failures", f"{count(len(failed), 'failed check')} must pass.", (), points)
    if missing := [o for o in outcomes if o.status == NOT_EVALUATED and o.required]:
        points = _first(case.sentence(o) for o in _by_check(missing))
        return Answer(
            "add_results", f"{count(len(missing), 'required result')} must be measured.", (), points
        )
    if open_ := [o for o in outcomes if o.status == INCONCLUSIVE]:
        points = _first(_data(o) for o in _by_check(open_))
        return Answer("add_data", f"{count(len(open_), 'check')} must be decided.", (), points)
    points = tuple(f"No release because {blocker}." for blocker in case.blockers)
    if not any(o.metric for o in case.own):
        return Answer("add_gate", "No number was compared with a limit; a gate does that.", (), points)
    near = nearest(case, [o for o in case.own if o.metric and o.status == PASS])
    if near is None:
        return Answer("exact_limits", "All limits are exact, so any changed value would fail.", (), points)
    outcome, at = near
    row = case.row_of(outcome)
    end = "the end of its interval" if row and row.low is not None else "its value"
    distance = f"{end}, {at.bound:.4g}, is {at.distance:.3g} from {at.limit:.4g}"
    sentence = f"{one_line(outcome.check, 200)} is closest to its limit: {distance}."
    return Answer("weakest_check", sentence, (), points)


def _fix(case: Case, outcome: Outcome) -> str:
    row = case.row_of(outcome)
    if row is None or row.value is None:
        return case.sentence(outcome)
    return f"{one_line(outcome.metric, 80)} is {shown_row(row).brief}; it must be {one_line(outcome.limit)}."


def _data(outcome: Outcome) -> str:
    check = one_line(outcome.check, 200)
    if needed := needed_text(outcome):
        return f"{check}: {needed} would decide, if the value stays the same."
    if outcome.mde is not None and isinf(outcome.mde):
        return f"{check}: this amount of data cannot decide, whatever the true value."
    if mde := mde_text(outcome):
        return (
            f"{check}: this amount of data decides true values at least {mde} from the limit; "
            "no number of samples decides at the observed value."
        )
    return f"{check}: {one_line(outcome.sentence, SENTENCE_LIMIT)}"


def _by_check(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The first outcome of each check and variant."""
    return list({(o.check, o.variant): o for o in reversed(outcomes)}.values())[::-1]


def _first(points: Iterable[str]) -> tuple[str, ...]:
    found = tuple(points)
    rest = len(found) - _MOST
    return (*found[:_MOST], f"{rest} more, see the checks below.") if rest > 0 else found
