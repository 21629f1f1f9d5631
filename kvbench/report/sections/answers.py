"""The four answers about a candidate format: is it running, safe, worth it, what would change the verdict."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite, isinf

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome
from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.units import MS, PERCENT
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, RUNGS, UNVERIFIED, VERIFIED, rung
from kvbench.render.numbers import NOT_MEASURED, Shown, one_line, shown_row
from kvbench.report.model import JudgedRun
from kvbench.report.sections import candidate as c
from kvbench.report.sections.candidate import Answer, Case, Figure, all_cells, others, runner_of, weakest
from kvbench.report.sections.checks import count, mde_text, needed_text
from kvbench.report.sections.precision import PrecisionLine

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
    run: JudgedRun, precision: Sequence[PrecisionLine], candidate: c.Candidate, blockers: Sequence[str]
) -> tuple[Answer, ...]:
    """The answers to the card's questions, in order. blockers: why the whole run cannot be a release."""
    cells, baselines = set(candidate.cells), set(candidate.baselines)
    own = tuple(o for o in run.verdict.outcomes if cells & set(o.cells))
    rest = (o for o in run.verdict.outcomes if not cells & set(o.cells))
    related = tuple(o for o in rest if not o.cells or baselines & set(o.cells))
    lines = tuple(line for line in precision if line.label.cells[0] in cells)
    case = Case(run, candidate, lines, own, related, tuple(blockers))
    runs = _running(case)
    return runs, _of_what_ran(runs, _safe(case)), _of_what_ran(runs, _worth(case)), _change(case)


def _of_what_ran(runs: Answer, answer: Answer) -> Answer:
    """A good answer counts only if the requested format is what ran."""
    if runs.tone in ("pass", "partial") or answer.tone in ("fail", "incomplete"):
        return answer
    doubt = "It is not proven that the requested format ran, so these numbers may be of another."
    return Answer("not_what_was_requested", f"{doubt} {answer.sentence}", answer.figures, answer.points)


def _running(case: Case) -> Answer:
    """Whether the requested precision ran, by the evidence of every cell and the precision check."""
    lines, cells = case.lines, count(len(case.lines), "cell")
    reads = {read for line in lines for read in line.reads}  # each record counted once
    quantized, tokens = sum(read[2] for read in reads), sum(read[1] for read in reads)
    shown = Shown(f"{quantized:,} of {tokens:,} tokens") if tokens else Shown(NOT_MEASURED, state="missing")
    figures = (Figure("read from quantized pages", shown),) if case.candidate.kv_format != "native" else ()
    checks = [o for o in case.own if o.check == "precision"]
    lost = next((line for line in lines if line.state == MISMATCH), None)
    fell = next((choice for line in lines for choice in line.choices if choice.fell_back), None)
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
    unproven = [line for line in lines if line.state == UNVERIFIED and not _reached(line)]
    if unproven:
        silent = len(unproven) == len(lines) and not any(line.levels for line in unproven)
        sentence = f"In {len(unproven)} of {cells} no evidence shows which precision ran."
        return Answer("no_evidence" if silent else "unproven", sentence, figures)
    if open_ := next((o for o in checks if o.status != PASS), None):
        return Answer("unproven", case.sentence(open_), figures)
    least = min((_reached(line) for line in lines), default="")
    level = Shown(least or "none", n=f"in {len(lines)} of {cells}")
    figures = (Figure("evidence level", level, note=_SHOWS.get(least, "")), *figures)
    sentence = f"{case.candidate.name} was requested, resolved and run in {all_cells(len(lines))}."
    if any(line.state == UNVERIFIED for line in lines):
        sentence += f" The evidence above {least} proves nothing, which the gate allows."
        return Answer("verified_in_part", sentence, figures)
    return Answer("verified", sentence, figures)


def _reached(line: PrecisionLine) -> str:
    """The highest evidence level up to which all applicable levels are verified, or ""."""
    best = ""
    for step in RUNGS:
        states = {level.state for level in line.levels if rung(level.name) == step} - {NOT_APPLICABLE}
        if states - {VERIFIED}:
            break
        best = step if states else best
    return best


def _safe(case: Case) -> Answer:
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
    if not judged:
        rows = (r for r in case.run.rows if r.metric in METRICS and r.cell in case.candidate.cells)
        if any(r.value is not None and METRICS[r.metric].runner in _TEXT for r in rows):
            return Answer("no_limit", "Quality was measured, but no check compares it with a limit.")
        return Answer("nothing_measured", "No quality check has a result.")
    if failed := [o for o in case.related if o.status == FAIL and runner_of(o) not in c.COST]:
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
        sentence = f"{passed}, but a plumbing test does not measure a model's quality."
        return Answer("plumbing", sentence, figures)
    if any(row and row.partial for row in map(case.row_of, judged)):
        return Answer("passed_on_part", f"{passed}, some on part of the data only.", figures)
    return Answer("passed", f"{passed}.", figures)


_FIGURES = ("kv_ratio", "kv_ratio_16bit", "weight_ratio", "itl_ratio", "ttft_ratio")
FASTER, SLOWER, UNDECIDED = "faster", "slower", "undecided"
_TOO_FEW, _UNTIMED = "too few samples", "not measured"
_PACES = (SLOWER, FASTER, UNDECIDED, _TOO_FEW, _UNTIMED)

# The reason of the answer by whether bytes are saved and by decoding over all cells; None: not measured.
# Mixed: faster in some cells only; slower: in some, and faster in none.
_SPEEDS = (FASTER, "mixed", SLOWER, UNDECIDED, None)
_BY_SPEED = {
    True: ("smaller_and_faster", "mixed", "smaller_but_slower", "smaller", "smaller_speed_unknown"),
    False: ("faster_only", "mixed", "neither", "undecided", "neither"),
    None: ("faster_only", "mixed", "undecided", "undecided", "nothing_measured"),
}
WORTH = {saves: dict(zip(_SPEEDS, reasons, strict=True)) for saves, reasons in _BY_SPEED.items()}


def _worth(case: Case) -> Answer:
    checks = case.about(case.own, cost=True)
    figures = tuple(_worst(case, m) for m in _FIGURES if case.rows(m) and not _unchanged(case, m))
    if failed := [o for o in checks if o.status == FAIL]:
        return Answer("check_failed", case.sentence(failed[0]), figures, others(failed))
    if failed := [o for o in case.related if o.status == FAIL and runner_of(o) in (*c.COST, "")]:
        return Answer("baseline_failed", f"The baseline failed: {case.sentence(failed[0])}")
    if open_ := [o for o in checks if o.status == INCONCLUSIVE]:
        return Answer("inconclusive", case.sentence(open_[0]), figures, others(open_))
    bytes_text, saves = _bytes(case)
    time_text, speed = _speed(case)
    if saves is None and speed is None:
        return Answer("nothing_measured", "Neither bytes nor times were compared with a baseline.")
    sentences = [bytes_text, time_text]
    if speed and {line.ran_on for line in case.lines} & {"torch", "interpreter"}:
        sentences.append("Attention ran in PyTorch, the reference; a compiled kernel has other times.")
    missing = [case.sentence(o) for o in checks if o.status == NOT_EVALUATED and o.required]
    return Answer(WORTH[saves][speed], " ".join(filter(None, sentences)), figures, tuple(missing[:2]))


def _worst(case: Case, metric: str) -> Figure:
    """The largest value over the candidate's cells, by the end of its interval, with the range of all."""
    rows = [(r, r.value) for r in case.rows(metric) if r.value is not None]
    odd = next((r for r, value in rows if not isfinite(value)), None)
    worst = odd or max(rows, key=lambda pair: pair[1] if pair[0].high is None else pair[0].high)[0]
    low, high = min(value for _, value in rows), max(value for _, value in rows)
    same = not odd and low == high
    ends = "" if same or odd else f": {MS.number(low)} to {MS.number(high)}"
    n, total = len({r.cell for r, _ in rows}), len(case.candidate.cells)
    cells = all_cells(n) if n == total else f"{n} of {count(total, 'cell')}"
    word = "measured in" if n == 1 else "the same in" if same else "the worst of"
    note = f"{word} {cells}{ends}" if total > 1 else ""
    where = case.run.labels.subject(METRICS[metric].runner, worst.cell) if not same or n < total else None
    return Figure(metric, shown_row(worst), where, "", note)


def _unchanged(case: Case, metric: str) -> bool:
    if metric.startswith("kv_ratio"):
        return case.candidate.kv_format == "native"
    return metric == "weight_ratio" and case.candidate.weights in ("native", "None")


def _bytes(case: Case) -> tuple[str, bool | None]:
    """The saved bytes as text, and whether any are saved; None where no bytes were compared."""
    parts, saved = [], []
    for metric, what in (("kv_ratio", "KV cache"), ("weight_ratio", "Weights")):
        rows = [] if _unchanged(case, metric) else case.rows(metric)
        values = [r.value for r in rows if r.value is not None]
        if not all(map(isfinite, values)):
            parts.append(f"{what}: a ratio to the baseline is not a number.")
            saved.append(False)
        elif values:
            rows = case.rows(f"{metric}_16bit")
            wide = [r.value for r in rows if r.value is not None and isfinite(r.value)]
            of_16bit = f" ({PERCENT.number(100 * max(wide))}% of 16 bits)" if wide else ""
            worst = max(values)
            change = f"{PERCENT.number(abs(100 * (1 - worst)))}% {'fewer' if worst < 1 else 'more'} bytes"
            parts.append(f"{what}: {change} than the baseline{of_16bit}.")
            saved.append(worst < 1)
    return " ".join(parts), any(saved) if saved else None


def _speed(case: Case) -> tuple[str, str | None]:
    """How decoding and the first token compare cell by cell, and one word for decoding over all cells."""
    words, parts, total = {}, [], len(case.candidate.cells)
    for metric, what in (("itl_ratio", "Decoding"), ("ttft_ratio", "The first token")):
        if rows := case.rows(metric):
            counts = Counter(map(_pace, rows)) + Counter({_UNTIMED: total - len(rows)})
            cells = ", ".join(f"{word} in {counts[word]}" for word in _PACES if counts[word])
            parts.append(f"{what}: {cells} of {count(total, 'cell')}.")
            if counts[FASTER]:
                words[metric] = FASTER if counts[FASTER] == total else "mixed"
            else:
                words[metric] = SLOWER if counts[SLOWER] else UNDECIDED
    return " ".join(parts) or "Speed was not measured.", words.get("itl_ratio")


def _pace(row: Row) -> str:
    """By the whole interval: below 1 the candidate is faster."""
    if row.low is None or row.high is None:
        return _TOO_FEW
    return FASTER if row.high < 1 else SLOWER if row.low > 1 else UNDECIDED


def _change(case: Case) -> Answer:
    outcomes = [*case.own, *case.related]
    if failed := [o for o in outcomes if o.status == FAIL]:
        points = _first(_fix(case, o) for o in _by_check(failed))
        return Answer("fix_failures", f"{count(len(failed), 'failed check')} must pass.", (), points)
    if missing := [o for o in outcomes if o.status == NOT_EVALUATED and o.required]:
        points = _first(case.sentence(o) for o in _by_check(missing))
        sentence = f"{count(len(missing), 'required result')} must be measured."
        return Answer("add_results", sentence, (), points)
    if open_ := [o for o in outcomes if o.status == INCONCLUSIVE]:
        points = _first(map(_data, _by_check(open_)))
        return Answer("add_data", f"{count(len(open_), 'check')} must be decided.", (), points)
    points = tuple(f"No release because {blocker}." for blocker in case.blockers)
    if not any(o.metric for o in case.own):
        return Answer("add_gate", "No number was compared with a limit; a gate does that.", (), points)
    near = c.nearest(case, [o for o in case.own if o.metric and o.status == PASS])
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
    text = one_line(outcome.sentence, c.SENTENCE_LIMIT)
    if needed := needed_text(outcome):
        text = f"{needed} would decide, if the value stays the same."
    elif outcome.mde is not None and isinf(outcome.mde):
        text = "this amount of data cannot decide, whatever the true value."
    elif mde := mde_text(outcome):
        text = (
            f"this amount of data decides true values at least {mde} from the limit; "
            "no number of samples decides at the observed value."
        )
    return f"{one_line(outcome.check, 200)}: {text}"


def _by_check(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return list({(o.check, o.variant): o for o in reversed(outcomes)}.values())[::-1]


def _first(points: Iterable[str]) -> tuple[str, ...]:
    found = tuple(points)
    rest = len(found) - _MOST
    return (*found[:_MOST], f"{rest} more, see the checks below.") if rest > 0 else found
