"""Teacher-forced agreement step by step: how large a share of the steps so far picked native's token, and the text where it first did not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.metrics.collect import Row
from kvbench.records.record import OK, Record
from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line, shown_row
from kvbench.report.model import JudgedRun

# A curve is drawn at so many steps, evenly, and at every step that differs; of more of these, at so many of them.
_EVEN, _MOST_DIFFERING = 200, 200

# Characters of each text that the page shows.
_TEXT_LIMIT = 1000

_NOT_STORED = "text not stored"


@dataclass(frozen=True)
class Passage:
    """The texts at the first divergence: what was read before it (`text not stored` in an older record), then what each goes on with."""

    before: str
    native: str
    candidate: str


@dataclass(frozen=True)
class AgreementLine:
    """points: (step, share of the steps up to it, itself too, that agree); steps: all of them; first: step of the first divergence, None
    where there is none; real: whether it is one beyond near-ties, None where that is not known; again: whether this is native against itself,
    which has no divergence of its own; sentence: to be read after the name."""

    name: str
    points: tuple[tuple[int, float], ...]
    steps: int
    share: Row | None
    first: int | None
    margin: float | None
    real: bool | None
    again: bool
    sentence: str
    passage: Passage | None = None

    @property
    def at_first(self) -> float | None:
        """The share at the first divergence."""
        return dict(self.points).get(self.first) if self.first is not None else None


def agreement_lines(run: JudgedRun, labels: Labels) -> tuple[AgreementLine, ...]:
    """A line a candidate that can be compared, then one a baseline that read its own text a second time."""
    rows = {(row.cell, row.metric): row for row in run.rows}
    candidates, again = [], []
    for record, task in run.done():
        cells = [cell for cell in task.cells if cell in labels.cells]
        if (
            record.runner != "agreement"
            or record.status != OK
            or not cells
            or not record.samples.get("tokens")
        ):
            continue
        label = labels.subject("agreement", cells[0])
        own = {metric: row for (cell, metric), row in rows.items() if cell == cells[0]}
        if task.baseline is None:
            if (flips := record.facts.get("aa_disagreements")) is not None:
                again.append(_again(label.text, record, flips, own.get("aa_disagreement")))
            continue
        native, forced = run.run.record(task.baseline), own.get("top1_teacher_forced")
        if native is not None and forced is not None and forced.value is not None:
            candidates.append(_candidate(label.text, record, native, own))
    return (*candidates, *again)


def _candidate(name: str, record: Record, native: Record, own: Mapping[str, Row]) -> AgreementLine:
    pairs = zip(record.samples["tokens"], native.samples["tokens"], strict=True)
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    steps, first = len(record.samples["tokens"]), differing[0] if differing else None
    margin, real = own.get("divergence_margin"), own.get("real_divergence")
    judged = None if first is None or real is None or real.value is None else real.value == first
    return AgreementLine(
        name, _curve(differing, steps), steps, own.get("top1_teacher_forced"), first, margin.value if margin else None, judged, False,
        _sentence(first, steps, own, judged), _passage(record) if first is not None else None,
    )  # fmt: skip


def _again(name: str, record: Record, flips: Sequence[int], row: Row | None) -> AgreementLine:
    steps = len(record.samples["tokens"])
    many = f"{len(flips)} of {steps:,} steps flip" if flips else f"none of {steps:,} steps flips"
    return AgreementLine(
        f"{name}, read again (A/A)", _curve(sorted(flips), steps), steps, row, None, None, None, True,
        f"{many} where the baseline reads its own text a second time",
    )  # fmt: skip


def _sentence(first: int | None, steps: int, own: Mapping[str, Row], judged: bool | None) -> str:
    forced = own["top1_teacher_forced"]
    found = shown_row(forced)
    said = f"agrees on {round((forced.value or 0) * steps):,} of {steps:,} steps ({' '.join(filter(None, (found.text, found.interval)))})"
    if first is None:
        return f"{said}, no divergence"
    margin, real = own.get("divergence_margin"), own.get("real_divergence")
    said += f"; first divergence at step {first:,}"
    if margin is not None and margin.value is not None:
        said += f", where native's top-2 margin is {margin.unit.number(margin.value)} logit"
    if judged:
        return f"{said}: a real divergence"
    if judged is None:
        why = one_line(real.note, 200) if real and real.note else "no noise floor was measured"
        return f"{said}; whether it is real is not known: {why}"
    later = "none beyond near-ties follows"
    if real is not None and real.value is not None and real.value < steps:
        later = f"the first beyond near-ties is at step {int(real.value):,}"
    return f"{said}: a near-tie within the baseline's own noise, no real divergence; {later}"


def _curve(differing: Sequence[int], steps: int) -> tuple[tuple[int, float], ...]:
    """The share at the steps that are drawn: the first, the last, even ones, and differing ones with the step before each."""
    if not steps:
        return ()
    at = {0, steps - 1, *(i * (steps - 1) // _EVEN for i in range(_EVEN))}
    for i in _spread(differing):
        at |= {max(0, i - 1), i}
    found, wrong, left = [], 0, iter([*differing, steps])
    following = next(left)
    for step in sorted(at):
        while following <= step:
            wrong += 1
            following = next(left)
        found.append((step, 1 - wrong / (step + 1)))
    return tuple(found)


def _spread(differing: Sequence[int]) -> Iterable[int]:
    if len(differing) <= _MOST_DIFFERING:
        return differing
    return {differing[i * len(differing) // _MOST_DIFFERING] for i in range(_MOST_DIFFERING)}


def _passage(record: Record) -> Passage:
    samples = record.samples
    return Passage(*(_text(samples.get(key)) for key in ("text_before", "native_text", "continuation_text")))


def _text(text: object) -> str:
    """Text of a model on as many lines as it has, whatever else is not printable as its escape; cut, and said so, past the limit."""
    if not isinstance(text, str):
        return _NOT_STORED
    kept = text[:_TEXT_LIMIT]
    shown = "\n".join(one_line(line) for line in kept.split("\n"))
    return shown if len(text) <= _TEXT_LIMIT else f"{shown} … ({len(text):,} characters in all)"
