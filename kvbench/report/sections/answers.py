"""The four answers about one candidate format: is it running, is it safe, is it worth it, and what would change the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvbench.metrics.collect import METRICS
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, RUNGS, UNVERIFIED, VERIFIED, rung
from kvbench.render.labels import Labels
from kvbench.render.numbers import NOT_MEASURED, Shown, one_line, shown_row
from kvbench.report.model import JudgedRun, OutcomeLike
from kvbench.report.sections.candidate import (
    COST,
    SENTENCE_LIMIT,
    Answer,
    Candidate,
    Case,
    Figure,
    all_cells,
    count,
    more,
    nearest,
    runner_of,
    weakest,
)
from kvbench.report.sections.gains import worth
from kvbench.report.sections.precision import PrecisionLine
from kvbench.report.sections.tables import limit_text, mde_text, needed_text

_TEXT = ("agreement", "generate", "perplexity", "mcq")  # those that saw a model's own output
_MOST = 4  # points of an answer

# What each rung of evidence shows, in a few words.
_SHOWS = {
    "E1": "dtypes and bytes of the live tensors",
    "E2": "stored codes equal to the reference quantizer's",
    "E3": "what is stored is what is read",
    "E4": "the kernels that ran",
    "E5": "output that differs from native within the format's bound",
}


def answers(run: JudgedRun, labels: Labels, precision: Sequence[PrecisionLine], candidate: Candidate,
            held: Sequence[str]) -> tuple[Answer, ...]:  # fmt: skip
    """held: what keeps the whole run from being a release."""
    mine = set(candidate.cells)
    own = tuple(o for o in run.verdict.outcomes if mine & set(o.cells))
    near = set(candidate.baselines)
    beside = tuple(o for o in run.verdict.outcomes if o not in own and (not o.cells or near & set(o.cells)))
    lines = tuple(line for line in precision if line.label.cells[0] in mine)
    case = Case(run, labels, candidate, lines, own, beside, tuple(held))
    runs = running(case)
    return runs, _if_it_ran(runs, safe(case)), _if_it_ran(runs, worth(case)), change(case)


def _if_it_ran(runs: Answer, answer: Answer) -> Answer:
    """Numbers of something else than what was asked for are good news of nothing."""
    if runs.tone in ("pass", "partial") or answer.tone in ("fail", "incomplete"):
        return answer
    said = f"What ran is not shown to be what was asked for, so these numbers are of something else. {answer.sentence}"
    return replace(answer, word="not shown", tone="incomplete", sentence=said)


def running(case: Case) -> Answer:
    """Effective precision, by the evidence of every cell and the check that no gate removes."""
    question, n = "Is it really running?", len(case.lines)
    asked = case.candidate.name
    found = [o for o in case.own if o.check == "precision"]
    read, tokens = _reads(case.lines)
    reads = Shown(f"{read:,} of {tokens:,} tokens") if tokens else Shown(NOT_MEASURED, state="missing")
    figures = (Figure("read from quantized pages", reads),) if case.candidate.kv_format != "native" else ()
    bad = [line for line in case.lines if line.state == MISMATCH]
    fell = [choice for line in case.lines for choice in line.choices if choice.fell_back]
    if lost := [o for o in found if o.status == "fail"]:
        word = "no" if bad or fell else "not shown"
        return Answer(question, word, "fail", case.said(lost[0]), figures, more(lost))
    if bad:
        levels = [level.sentence for level in bad[0].levels if level.state == MISMATCH]
        said = levels[0] if levels else f"{bad[0].kv.resolved} was resolved, {bad[0].effective} is what ran."
        return Answer(question, "no", "fail", said, figures)
    if fell:
        said = f"{fell[0].aspect} {fell[0].requested} was asked for, {fell[0].resolved} ran: {fell[0].reason}"
        return Answer(question, "no", "fail", said, figures)
    dark = [line for line in case.lines if line.state == UNVERIFIED and not _reached(line)]
    if dark or any(o.status != "pass" for o in found):
        said = f"In {len(dark) or 'some'} of {count(n, 'cell')} nothing shows which precision ran." if dark else case.said(
            next(o for o in found if o.status != "pass"))  # fmt: skip
        nothing = len(dark) == n and not any(line.levels for line in dark)
        return Answer(question, NOT_MEASURED if nothing else "not shown", "incomplete", said, figures)
    least = min((_reached(line) for line in case.lines), default="")
    seen = Figure(
        "evidence reached",
        Shown(least or "none", n=f"in {n} of {count(n, 'cell')}"),
        note=_SHOWS.get(least, ""),
    )
    said = f"{asked} was requested, resolved and is what ran in {all_cells(n)}."
    if any(line.state == UNVERIFIED for line in case.lines):
        said += f" Above {least} the evidence shows nothing, which the gate allows."
        return Answer(question, f"up to {least}", "partial", said, (seen, *figures))
    return Answer(question, "yes", "pass", said, (seen, *figures))


def safe(case: Case) -> Answer:
    """By the checks on quality; the weakest is the one that is nearest to its limit."""
    question = "Is it safe?"
    checks = case.about(case.own, cost=False)
    judged = [o for o in checks if o.metric and o.status != "not_evaluated"]
    if broken := [o for o in checks if o.status == "fail"]:
        return Answer(question, "no", "fail", case.said(broken[0]), weakest(case, broken[:1]), more(broken))
    if any(spec.get("model_weights") == "random" for spec in case.specs):
        return Answer(
            question,
            NOT_MEASURED,
            "incomplete",
            "The weights are random: quality numbers would mean nothing.",
        )
    lacking = [o for o in checks if o.status == "not_evaluated" and o.required]
    if not judged and lacking:
        return Answer(question, "not shown", "incomplete", case.said(lacking[0]), (), more(lacking))
    if not judged:
        some = any(METRICS[r.metric].runner in _TEXT for r in case.run.rows if r.metric in METRICS and r.value is not None
                   and r.cell in case.candidate.cells)  # fmt: skip
        said = (
            "Quality was measured, but no check holds it to a limit."
            if some
            else "No check on quality has a result."
        )
        return Answer(question, "not judged" if some else NOT_MEASURED, "incomplete", said)
    if doubt := [o for o in case.beside if o.status == "fail" and runner_of(o) not in COST]:
        return Answer(
            question, "not shown", "inconclusive", f"What it is compared with failed: {case.said(doubt[0])}"
        )
    figures = weakest(case, judged)
    if open_ := [o for o in checks if o.status == "inconclusive"]:
        said = f"{count(len(open_), 'check')} of {len(judged)} cannot be decided by this data: {case.said(open_[0])}"
        return Answer(question, "open", "inconclusive", said, weakest(case, open_[:1]), more(open_))
    if lacking:
        return Answer(question, "not shown", "incomplete", case.said(lacking[0]), figures, more(lacking))
    passed = f"{count(len(judged), 'check')} on quality passed"
    if not any(runner_of(o) in _TEXT for o in judged):
        return Answer(
            question,
            "in part",
            "partial",
            f"{passed}, all of tensors: no text that the model reads or writes was judged.",
            figures,
        )
    if any(spec.get("plumbing") for spec in case.specs):
        return Answer(
            question,
            "not shown",
            "incomplete",
            f"{passed}, but of a plumbing run, which is about no model's quality.",
            figures,
        )
    if any(row and row.partial for row in map(case.row_of, judged)):
        return Answer(
            question, "yes, on a part", "partial", f"{passed}, some of them on a part of their data.", figures
        )
    return Answer(question, "yes", "pass", f"{passed}.", figures)


def change(case: Case) -> Answer:
    """What stands between this verdict and another one: faults, missing data, or the nearest limit."""
    question = "What would change the verdict?"
    everything = [*case.own, *case.beside]
    broken = [o for o in everything if o.status == "fail"]
    if broken:
        points = [_mend(case, o) for o in _by_check(broken)]
        return Answer(
            question,
            "a fix",
            "info",
            f"{count(len(broken), 'failed check')} would have to pass.",
            (),
            _first(points),
        )
    lacking = [o for o in everything if o.status == "not_evaluated" and o.required]
    if lacking:
        points = [case.said(o) for o in _by_check(lacking)]
        return Answer(
            question,
            "the missing results",
            "info",
            f"{count(len(lacking), 'result')} would have to be there.",
            (),
            _first(points),
        )
    open_ = [o for o in everything if o.status == "inconclusive"]
    if open_:
        points = [_data(o) for o in _by_check(open_)]
        return Answer(
            question,
            "more data",
            "info",
            f"{count(len(open_), 'check')} would have to be decided.",
            (),
            _first(points),
        )
    missing = tuple(f"Held back: {why}." for why in case.held)
    near = nearest(case, [o for o in case.own if o.metric and o.status == "pass"])
    if near is None:
        said = (
            "No limit is near: what was checked is exact."
            if any(o.metric for o in case.own)
            else "A gate: nothing was held to a limit."
        )
        return Answer(
            question,
            "a gate" if not any(o.metric for o in case.own) else "a fault",
            "info",
            said,
            (),
            missing,
        )
    outcome, at = near
    said = (
        f"{one_line(outcome.check, 200)} is nearest to its limit: {_end(case, outcome)} {at.bound:.4g} is {at.distance:.3g} from "
        f"{at.limit:.4g}."
    )
    return Answer(question, "the weakest check", "info", said, (), missing)


def _reads(lines: Iterable[PrecisionLine]) -> tuple[int, int]:
    """(tokens read from quantized pages, tokens read), each record once."""
    reads = {read for line in lines for read in line.reads}
    return sum(read[2] for read in reads), sum(read[1] for read in reads)


def _reached(line: PrecisionLine) -> str:
    """The highest rung up to which every level that applies is verified, or ""."""
    best = ""
    for step in RUNGS:
        states = {level.state for level in line.levels if rung(level.name) == step} - {NOT_APPLICABLE}
        if states - {VERIFIED}:
            break
        best = step if states else best
    return best


def _mend(case: Case, outcome: OutcomeLike) -> str:
    row = case.row_of(outcome) if outcome.metric else None
    if row is None or row.value is None:
        return case.said(outcome)
    return (
        f"{one_line(outcome.metric, 80)} is {shown_row(row).brief}; it has to be {limit_text(outcome.limit)}."
    )


def _data(outcome: OutcomeLike) -> str:
    check = one_line(outcome.check, 200)
    if needed := needed_text(outcome):
        return f"{check}: {needed} would decide, if the value stays what it is."
    if mde := mde_text(outcome):
        return f"{check}: so much data decides a true value {mde} from the limit; at the value that was found no number does."
    return f"{check}: {one_line(outcome.sentence, SENTENCE_LIMIT)}"


def _end(case: Case, outcome: OutcomeLike) -> str:
    row = case.row_of(outcome)
    return "its interval's end at" if row and row.low is not None else "its value of"


def _by_check(outcomes: Iterable[OutcomeLike]) -> list[OutcomeLike]:
    """The first outcome of each check and variant: cells that share a fault share a point."""
    return list({(o.check, o.variant): o for o in reversed(list(outcomes))}.values())[::-1]


def _first(points: Sequence[str]) -> tuple[str, ...]:
    more = len(points) - _MOST
    return (*points[:_MOST], f"and {more} more, in the checks below.") if more > 0 else tuple(points)
