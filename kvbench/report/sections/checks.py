"""The table of checks: outcomes grouped by check, equal findings of several cells on one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import OutcomeLike
from kvbench.report.sections.tables import limit_text, mde_text, needed_text, value_text


@dataclass(frozen=True)
class CheckLine:
    """One outcome, or several that say the same. value: "" where the check is about no number; mde, n_needed: the smallest
    distance from the limit that so much data decides, and the samples that would decide, "" where nothing is estimated.
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
    """One check and what came of it everywhere."""

    check: str
    limit: str
    required: bool
    why: str
    lines: tuple[CheckLine, ...]


def check_groups(outcomes: Sequence[OutcomeLike], labels: Labels) -> tuple[CheckGroup, ...]:
    """Outcomes by check, in the gate's order; within a check those that did not pass come first."""
    groups: dict[tuple[str, str, bool, str], list[OutcomeLike]] = {}
    for outcome in outcomes:
        limit = limit_text(outcome.limit)
        groups.setdefault((outcome.check, limit, outcome.required, outcome.why or ""), []).append(outcome)
    return tuple(
        CheckGroup(one_line(check, 200), limit, required, one_line(why, 1000), _check_lines(members, labels))
        for (check, limit, required, why), members in groups.items()
    )


def _check_lines(outcomes: Sequence[OutcomeLike], labels: Labels) -> tuple[CheckLine, ...]:
    where: dict[tuple[str, ...], list[str]] = {}
    for outcome in sorted(outcomes, key=lambda o: o.status == "pass"):
        sentence = one_line(labels.unnamed(outcome.sentence, outcome.cells), 1000)
        words = (one_line(outcome.variant, 120), outcome.status, value_text(outcome), sentence)
        key = (*words, mde_text(outcome), needed_text(outcome))
        where.setdefault(key, []).extend(outcome.cells)
    return tuple(CheckLine(labels.places(cells), *key) for key, cells in where.items())
