"""Failures, fallbacks, and what was not measured in full, each with its place."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, Outcome
from kvbench.matrix.cells import Task
from kvbench.records.record import ERROR, MISMATCH, NOT_EVALUATED, NOT_SHOWN, OK, REFUSED, UNVERIFIED
from kvbench.records.run import CANARY, UNTIL_DECIDED
from kvbench.render.labels import Label
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun
from kvbench.report.sections.checks import value_text
from kvbench.report.sections.precision import PrecisionLine

# Advice on tasks that an option left out.
_LEFT_OUT = {
    UNTIL_DECIDED: "They cannot change the verdict. Run without --until-decided to measure them too.",
    CANARY: "Fix the cause, then run the same command again to measure them.",
}
_PARTIAL = "They use only part of the data; only a gate with allow_partial accepts them."
_SENTENCE_LIMIT = 1000
_TAIL_LIMIT = 4000
# Checks of tasks without a result: the findings show them from their records, which have more.
_TASK_CHECKS = frozenset({"cell error", "refused", "not available", "not run", "skipped"})


@dataclass(frozen=True)
class Item:
    """Where a finding applies. value, limit: of the check, or ""; tail: the end of a traceback, or ""."""

    where: tuple[Label, ...]
    sentence: str
    value: str = ""
    limit: str = ""
    tail: str = ""


@dataclass(frozen=True)
class Finding:
    """kind: a word for the badge ("mismatch", "failed", "error", ...); why: the gate's own reason, or ""."""

    kind: str
    title: str
    items: tuple[Item, ...]
    why: str = ""


def failures(run: JudgedRun, precision: Sequence[PrecisionLine]) -> tuple[Finding, ...]:
    """What went wrong, worst first: lost precision, failed checks, task errors, unproven precision."""
    lost = [*_precision(run, precision, MISMATCH, "Precision lost")]
    unproven = [*_precision(run, precision, UNVERIFIED, "Precision not proven")]
    shown = [item.sentence for finding in (*lost, *unproven) for item in finding.items]
    return (
        *lost,
        *_outcomes(run, FAIL, "failed", shown),
        *_records(run, ERROR),
        *unproven,
        *_outcomes(run, INCONCLUSIVE, "inconclusive"),
    )


def gaps(run: JudgedRun) -> tuple[Finding, ...]:
    """What is missing or uses only part of the data, with the reason."""
    return (
        *_outcomes(run, NOT_EVALUATED, "not evaluated"),
        *_records(run, REFUSED),
        *_records(run, NOT_EVALUATED),
        *_missing(run),
        *_partial(run),
    )


def _missing(run: JudgedRun) -> Iterator[Finding]:
    waiting: dict[Label, list[str]] = {}
    for task in run.run.missing():
        waiting.setdefault(run.labels.task(task), []).append(_task_name(task))
    found = ((f"No record of {', '.join(names)}.", label.cells) for label, names in waiting.items())
    items = tuple(Item(where, sentence) for sentence, where in run.gathered(found))
    if items and run.manifest.stopped:
        yield Finding("left out", f"Tasks {run.manifest.not_run}", items, _LEFT_OUT[run.manifest.stopped.by])
    elif items:
        again = "Run the same command again to measure them."
        yield Finding("missing", "Tasks that have not run", items, again)


def _partial(run: JudgedRun) -> Iterator[Finding]:
    where: dict[str, list[Label]] = {}
    for record, task in run.done():
        if record.status == OK and record.partial:
            sentence = f"{_task_name(task)}: {one_line(record.partial, _SENTENCE_LIMIT)}"
            where.setdefault(sentence, []).append(run.labels.task(task))
    if where:
        items = tuple(Item(tuple(places), sentence) for sentence, places in where.items())
        yield Finding("partial", "Partial results", items, _PARTIAL)


def _precision(run: JudgedRun, lines: Sequence[PrecisionLine], state: str, title: str) -> Iterator[Finding]:
    """One finding; cells with the same sentence share an item.

    A cell whose effective format differs from the resolved one is named even when no evidence level says so.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for line in lines:
        if state == UNVERIFIED and not line.kv.resolved:
            continue  # nothing ran; the gaps name the cell
        states = NOT_SHOWN if state == UNVERIFIED else (state,)
        sentences = [f"{level.name}: {level.sentence}" for level in line.levels if level.state in states]
        if state == MISMATCH:
            sentences = [choice.dropped_text for choice in line.choices if choice.dropped] + sentences
        if not sentences and line.state == state == UNVERIFIED:
            sentences = ["No evidence was recorded for this cell."]
        elif not sentences and line.state == state:
            same = line.effective in (line.kv.resolved, "unknown")
            weights = (line.choice("weights"), line.effective_weights)
            choice, ran = weights if same else (line.kv, line.effective)
            sentences = [f"{choice.resolved} was resolved, but {ran} ran."]
        found += [(one_line(x, _SENTENCE_LIMIT), line.label.cells) for x in dict.fromkeys(sentences)]
    if found:
        items = tuple(Item(where, sentence) for sentence, where in run.gathered(found))
        yield Finding(state, title, items)


def _outcomes(run: JudgedRun, status: str, kind: str, shown: Sequence[str] = ()) -> Iterator[Finding]:
    """The outcomes of one status, one finding a check; equal sentences share an item.

    Left out are outcomes of tasks, and precision outcomes that repeat a sentence of `shown`.
    """
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for o in run.verdict.outcomes:
        repeated = not o.metric and any(sentence in o.sentence for sentence in shown)
        if o.status == status and not repeated and o.check not in _TASK_CHECKS:
            grouped.setdefault((o.check, o.variant), []).append(o)
    for (check, variant), outcomes in grouped.items():
        found = []
        for o in outcomes:
            sentence = one_line(run.labels.unnamed(o.sentence, o.cells), _SENTENCE_LIMIT)
            found.append(((sentence, value_text(o), one_line(o.limit)), o.cells))
        title = one_line(f"{check} ({variant})" if variant else check, 200)
        optional = "" if any(o.required for o in outcomes) else "Not required. "
        items = tuple(Item(where, *key) for key, where in run.gathered(found))
        yield Finding(kind, title, items, optional + one_line(outcomes[0].why, _SENTENCE_LIMIT))


def _records(run: JudgedRun, status: str) -> Iterator[Finding]:
    grouped: dict[str, dict[tuple[str, str], list[Label]]] = {}
    for record, task in run.done():
        if record.status == status:
            error = record.error or {}
            word = one_line(str(error.get("type") or error.get("reason") or "no reason recorded"), 120)
            message = one_line(str(error.get("message") or ""), _SENTENCE_LIMIT)
            where = grouped.setdefault(f"{_task_name(task)}: {word}", {})
            where.setdefault((message, _tail(error.get("tail") or "")), []).append(run.labels.task(task))
    for title, found in grouped.items():
        items = tuple(Item(tuple(places), text, tail=tail) for (text, tail), places in found.items())
        yield Finding(status.replace("_", " "), title, items)


def _tail(tail: str | Iterable[str]) -> str:
    lines = tail.splitlines() if isinstance(tail, str) else tail
    text = "\n".join(one_line(line.expandtabs(4)) for line in lines)
    return text if len(text) <= _TAIL_LIMIT else f"…{text[-_TAIL_LIMIT:]}"


def _task_name(task: Task) -> str:
    return one_line(task.title, 120)
