"""Teacher-forced agreement by step, and the texts at the first divergence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.metrics.collect import Row
from kvbench.records.record import Record
from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line, shown_row
from kvbench.report.figures.records import completed
from kvbench.report.model import JudgedRun

# A curve has points at so many evenly spaced steps and at up to so many differing steps.
_EVEN_STEPS, _MOST_DIFFERING = 200, 200

_TEXT_LIMIT = 1000  # characters of each text on the page
_NOT_STORED = "text not stored"


@dataclass(frozen=True)
class Passage:
    """The text before the first divergence, and how the baseline and the candidate continue it."""

    before: str
    native: str
    candidate: str


@dataclass(frozen=True)
class AgreementLine:
    """points: (step, share of agreement over the steps up to and including it); first: step of the first
    divergence, or None; real: whether it exceeds a near-tie, None if unknown; again: whether this is the
    baseline compared with itself; sentence: continues the name.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    steps: int
    share: Row | None
    sentence: str
    first: int | None = None
    margin: float | None = None
    real: bool | None = None
    again: bool = False
    passage: Passage | None = None

    @property
    def at_first(self) -> float | None:
        """The share at the first divergence."""
        return dict(self.points).get(self.first) if self.first is not None else None


def agreement_lines(run: JudgedRun, labels: Labels) -> tuple[AgreementLine, ...]:
    """One line per comparable candidate, then one per baseline that was repeated (A/A)."""
    rows = {(row.cell, row.metric): row for row in run.rows}
    candidates, again = [], []
    for record, task, cells in completed(run, labels, "agreement"):
        if not record.samples.get("tokens"):
            continue
        name = labels.subject("agreement", cells[0]).text
        own = {metric: row for (cell, metric), row in rows.items() if cell == cells[0]}
        if task.baseline is None:
            if (flips := record.facts.get("aa_disagreements")) is not None:
                again.append(_again(name, record, flips, own.get("aa_disagreement")))
            continue
        native, forced = run.run.record(task.baseline), own.get("top1_teacher_forced")
        if native is not None and forced is not None and forced.value is not None:
            candidates.append(_candidate(name, record, native, own))
    return (*candidates, *again)


def _candidate(name: str, record: Record, native: Record, own: Mapping[str, Row]) -> AgreementLine:
    pairs = zip(record.samples["tokens"], native.samples["tokens"], strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    steps, share = len(record.samples["tokens"]), own["top1_teacher_forced"]
    if not differing:
        return AgreementLine(name, _curve([], steps), steps, share, _sentence(None, steps, own, None))
    first = differing[0]
    margin, beyond = own.get("divergence_margin"), own.get("real_divergence")
    real = None if beyond is None or beyond.value is None else beyond.value == first
    sentence = _sentence(first, steps, own, real)
    return AgreementLine(
        name,
        _curve(differing, steps),
        steps,
        share,
        sentence,
        first,
        margin.value if margin else None,
        real,
        passage=_passage(record),
    )


def _again(name: str, record: Record, flips: Sequence[int], row: Row | None) -> AgreementLine:
    steps = len(record.samples["tokens"])
    count = f"{len(flips)} of {steps:,} steps differ" if flips else f"none of {steps:,} steps differs"
    sentence = f"{count} when the baseline reads its own text a second time"
    curve = _curve(sorted(flips), steps)
    return AgreementLine(f"{name}, repeated (A/A)", curve, steps, row, sentence, again=True)


def _sentence(first: int | None, steps: int, own: Mapping[str, Row], real: bool | None) -> str:
    forced = own["top1_teacher_forced"]
    found = shown_row(forced)
    share = " ".join(filter(None, (found.text, found.interval)))
    text = f"agrees on {round((forced.value or 0) * steps):,} of {steps:,} steps ({share})"
    if first is None:
        return f"{text}, no divergence"
    margin, beyond = own.get("divergence_margin"), own.get("real_divergence")
    text += f"; first divergence at step {first:,}"
    if margin is not None and margin.value is not None:
        text += f", where native's top-2 margin is {margin.unit.number(margin.value)} logit"
    if real:
        return f"{text}: a real divergence"
    if real is None:
        why = one_line(beyond.note, 200) if beyond and beyond.note else "no noise floor was measured"
        return f"{text}; it is not known whether it is real: {why}"
    later = "no real divergence follows"
    if beyond is not None and beyond.value is not None and beyond.value < steps:
        later = f"the first real divergence is at step {int(beyond.value):,}"
    return f"{text}: a near-tie within the baseline's own noise; {later}"


def _curve(differing: Sequence[int], steps: int) -> tuple[tuple[int, float], ...]:
    """The share at the first and last step, at even steps, and at each differing step and the one before."""
    if not steps:
        return ()
    at = {0, steps - 1, *(i * (steps - 1) // _EVEN_STEPS for i in range(_EVEN_STEPS))}
    for i in _sampled(differing):
        at |= {max(0, i - 1), i}
    found, wrong, left = [], 0, iter([*differing, steps])
    following = next(left)
    for step in sorted(at):
        while following <= step:
            wrong += 1
            following = next(left)
        found.append((step, 1 - wrong / (step + 1)))
    return tuple(found)


def _sampled(differing: Sequence[int]) -> Iterable[int]:
    if len(differing) <= _MOST_DIFFERING:
        return differing
    return {differing[i * len(differing) // _MOST_DIFFERING] for i in range(_MOST_DIFFERING)}


def _passage(record: Record) -> Passage:
    keys = ("text_before", "native_text", "continuation_text")
    return Passage(*(_text(record.samples.get(key)) for key in keys))


def _text(text: object) -> str:
    """A model's text with its line breaks, other unprintable characters escaped, cut at the limit."""
    if not isinstance(text, str):
        return _NOT_STORED
    shown = "\n".join(one_line(line) for line in text[:_TEXT_LIMIT].split("\n"))
    return shown if len(text) <= _TEXT_LIMIT else f"{shown} … ({len(text):,} characters in all)"
