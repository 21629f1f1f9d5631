"""What a reader must not miss: failures, fallbacks, and what was not measured in full, each with its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.records.record import ERROR, MISMATCH, NOT_EVALUATED, NOT_SHOWN, OK, REFUSED, UNVERIFIED
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun, OutcomeLike
from kvbench.report.sections.precision import ChoiceLine, PrecisionLine
from kvbench.report.sections.tables import limit_text, value_text

LEFT_OUT = "What they would find could only add to it. Run without --until-decided to measure them too."
_SENTENCE_LIMIT = 1000
_TAIL_LIMIT = 4000
# The gate's words for tasks that gave no result: they are shown from their records, which hold more.
_TASK_CHECKS = frozenset({"cell error", "refused", "not available", "not run", "skipped"})


@dataclass(frozen=True)
class Item:
    """One place where a finding holds. value, limit: what was measured and what was asked, or ""; tail: the end of
    a traceback, or "".
    """

    where: tuple[Label, ...]
    sentence: str
    value: str = ""
    limit: str = ""
    tail: str = ""


@dataclass(frozen=True)
class Finding:
    """kind: a word for the badge ("precision", "check", "error", ...); why: the gate's own reason, or ""."""

    kind: str
    title: str
    items: tuple[Item, ...]
    why: str = ""


def failures(run: JudgedRun, labels: Labels, precision: Sequence[PrecisionLine]) -> tuple[Finding, ...]:
    """What went wrong, gravest first: precision that was lost, failed checks, cell errors, unproven precision."""
    lost = [*_lost(precision, labels, MISMATCH, "mismatch", "Precision lost")]
    unproven = [*_lost(precision, labels, UNVERIFIED, "unverified", "Precision not proven")]
    said = [item.sentence for finding in (*lost, *unproven) for item in finding.items]
    return (
        *lost,
        *_outcomes(run, labels, "fail", "failed", said),
        *_records(run, labels, ERROR, "error"),
        *unproven,
        *_outcomes(run, labels, "inconclusive", "inconclusive"),
    )


def gaps(run: JudgedRun, labels: Labels) -> tuple[Finding, ...]:
    """What is missing or covers less than the whole, with the reason."""
    missing = run.run.missing()
    waiting: dict[Label, list[str]] = {}
    for task in missing:
        waiting.setdefault(labels.task(task), []).append(_task_name(task.runner, task.variant))
    alike: dict[str, list[str]] = {}
    for label, names in waiting.items():
        alike.setdefault(f"No record of {', '.join(names)}.", []).extend(label.cells)
    unrun = tuple(Item(labels.places(cells), sentence) for sentence, cells in alike.items())
    partial: dict[str, list[Label]] = {}
    for record, task in run.done():
        if record.status == OK and record.partial:
            name = _task_name(task.runner, task.variant)
            partial.setdefault(f"{name}: {one_line(record.partial, _SENTENCE_LIMIT)}", []).append(
                labels.task(task)
            )
    parts = tuple(Item(tuple(where), sentence) for sentence, where in partial.items())
    return (
        *_outcomes(run, labels, "not_evaluated", "not evaluated"),
        *_records(run, labels, REFUSED, "refused"),
        *_records(run, labels, NOT_EVALUATED, "not evaluated"),
        *((_unrun(run, unrun),) if unrun else ()),
        *((Finding("partial", "Partial results", parts, "They cover less than the whole; only a gate that allows "
           "partial results may use them."),) if parts else ()),
    )  # fmt: skip


def _unrun(run: JudgedRun, items: tuple[Item, ...]) -> Finding:
    """Tasks that were left out on purpose are no gap that another run would fill."""
    if run.manifest.stopped:
        return Finding("left out", f"Tasks {run.manifest.not_run}", items, LEFT_OUT)
    return Finding("missing", "Tasks that have not run", items, "Run the same command again to measure them.")


def _lost(
    precision: Sequence[PrecisionLine], labels: Labels, state: str, kind: str, title: str
) -> Iterable[Finding]:
    """One finding a state; cells with the same sentence share an item. A cell whose effective format differs from
    the resolved one is named even when no level says so.
    """
    where: dict[str, list[str]] = {}
    for line in precision:
        if state == UNVERIFIED and not line.kv.resolved:
            continue  # nothing was run that could be proven; the gaps name the cell
        states = NOT_SHOWN if state == UNVERIFIED else (state,)
        sentences = [f"{level.name}: {level.sentence}" for level in line.levels if level.state in states]
        if state == MISMATCH:
            sentences = [_dropped(choice) for choice in line.choices if choice.dropped] + sentences
        if not sentences and line.state == state:
            sentences = [_unexplained(line, state)]
        for sentence in dict.fromkeys(sentences):
            where.setdefault(sentence, []).extend(line.label.cells)
    if where:
        items = tuple(
            Item(labels.places(cells), one_line(sentence, _SENTENCE_LIMIT))
            for sentence, cells in where.items()
        )
        yield Finding(kind, title, items)


def _dropped(choice: ChoiceLine) -> str:
    return (
        f"The matrix asks for {choice.aspect} {choice.requested}, the resolver was asked for {choice.asked}: "
        "the request was dropped on the way."
    )


def _unexplained(line: PrecisionLine, state: str) -> str:
    if state == MISMATCH:
        kept = line.effective in (line.kv.resolved, "unknown")
        choice, ran = (line.weights, line.effective_weights) if kept else (line.kv, line.effective)
        return f"{choice.resolved} was resolved and {ran} is what ran."
    return "No evidence was recorded for this cell."


def _outcomes(
    run: JudgedRun, labels: Labels, status: str, kind: str, said: Sequence[str] = ()
) -> Iterable[Finding]:
    """The outcomes of one status, one finding a check; those with the same sentence share an item. Left out is what
    is shown otherwise: a precision outcome that repeats a sentence `said` already, and the outcomes of tasks.
    """
    grouped: dict[tuple[str, str], list[OutcomeLike]] = {}
    for outcome in run.verdict.outcomes:
        repeated = not outcome.metric and any(sentence in outcome.sentence for sentence in said)
        if outcome.status == status and not repeated and outcome.check not in _TASK_CHECKS:
            grouped.setdefault((outcome.check, outcome.variant), []).append(outcome)
    for (check, variant), outcomes in grouped.items():
        where: dict[tuple[str, str, str], list[str]] = {}
        for o in outcomes:
            sentence = one_line(labels.unnamed(o.sentence, o.cells), _SENTENCE_LIMIT)
            where.setdefault((sentence, value_text(o), limit_text(o.limit)), []).extend(o.cells)
        title = one_line(f"{check} ({variant})" if variant else check, 200)
        optional = "" if any(outcome.required for outcome in outcomes) else "Not required. "
        items = tuple(Item(labels.places(cells), *key) for key, cells in where.items())
        yield Finding(kind, title, items, optional + one_line(outcomes[0].why or "", _SENTENCE_LIMIT))


def _records(run: JudgedRun, labels: Labels, status: str, kind: str) -> Iterable[Finding]:
    """The records of one status, one finding a task and kind of error; equal messages share an item."""
    grouped: dict[str, dict[tuple[str, str], list[Label]]] = {}
    for record, task in run.done():
        if record.status == status:
            error = record.error or {}
            word = one_line(str(error.get("type") or error.get("reason") or "no reason recorded"), 120)
            message = one_line(str(error.get("message") or ""), _SENTENCE_LIMIT)
            places = grouped.setdefault(f"{_task_name(task.runner, task.variant)}: {word}", {})
            places.setdefault((message, _clean(error.get("tail") or "")), []).append(labels.task(task))
    for title, where in grouped.items():
        items = tuple(Item(tuple(places), said, tail=tail) for (said, tail), places in where.items())
        yield Finding(kind, title, items)


def _clean(tail: str | Sequence[str]) -> str:
    """The last lines of a traceback as they are, with whatever is not printable in them escaped."""
    lines = tail.splitlines() if isinstance(tail, str) else tail
    text = "\n".join(one_line(line.expandtabs(4)) for line in lines)
    return text if len(text) <= _TAIL_LIMIT else f"…{text[-_TAIL_LIMIT:]}"


def _task_name(runner: str, variant: str) -> str:
    return one_line(f"{runner} {variant}".strip(), 120)
