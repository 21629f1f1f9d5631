"""The table of checks: outcomes grouped by check, equal findings of several cells on one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.gate.verdict import PASS, Outcome
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.sections.wording import mde_text, needed_text, value_text


@dataclass(frozen=True)
class CheckLine:
    """One outcome, or several with the same text.

    value: "" where the check is not about a number. mde: the smallest distance from the limit that this
    amount of data can detect. n_needed: how many samples would decide. Both are "" where nothing is
    estimated.
    """

    where: tuple[Label, ...]
    variant: str
    status: str
    value: str
    sentence: str
    mde: str
    n_needed: str


@dataclass(frozen=True)
class CheckGroup:
    """One check with its outcomes on all cells."""

    check: str
    limit: str
    required: bool
    why: str
    lines: tuple[CheckLine, ...]


def check_groups(outcomes: Sequence[Outcome], labels: Labels) -> tuple[CheckGroup, ...]:
    """Outcomes by check, in the gate's order; within a check those that did not pass come first."""
    groups: dict[tuple[str, str, bool, str], list[Outcome]] = {}
    for o in outcomes:
        key = (one_line(o.check, 200), one_line(o.limit), o.required, one_line(o.why, 1000))
        groups.setdefault(key, []).append(o)
    return tuple(CheckGroup(*key, _check_lines(members, labels)) for key, members in groups.items())


def _check_lines(outcomes: Sequence[Outcome], labels: Labels) -> tuple[CheckLine, ...]:
    where: dict[tuple[str, ...], list[str]] = {}
    for o in sorted(outcomes, key=lambda o: o.status == PASS):
        sentence = one_line(labels.unnamed(o.sentence, o.cells), 1000)
        words = (one_line(o.variant, 120), o.status, value_text(o), sentence, mde_text(o), needed_text(o))
        where.setdefault(words, []).extend(o.cells)
    return tuple(CheckLine(labels.places(cells), *words) for words, cells in where.items())
