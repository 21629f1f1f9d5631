"""The table of checks, and short texts about checks and places that several outputs share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.gate.verdict import NOT_EVALUATED, PASS, Outcome
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.units import NUMBER
from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED, counted_of, one_line
from kvbench.report.model import JudgedRun


@dataclass(frozen=True)
class CheckLine:
    """One outcome, or several with the same text.

    value: "" where the check is not about a number. mde: the smallest distance from the limit that so much
    data can detect. n_needed: how many samples would decide. Both are "" where nothing is estimated.
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


def check_groups(run: JudgedRun) -> tuple[CheckGroup, ...]:
    """Outcomes by check, in the gate's order; within a check those that did not pass come first."""
    groups: dict[tuple[str, str, bool, str], list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
    for o in run.verdict.outcomes:
        key = (one_line(o.check, 200), one_line(o.limit), o.required, one_line(o.why, 1000))
        sentence = one_line(run.labels.unnamed(o.sentence, o.cells), 1000)
        words = (one_line(o.variant, 120), o.status, value_text(o), sentence, mde_text(o), needed_text(o))
        groups.setdefault(key, []).append((words, o.cells))
    found = []
    for key, own in groups.items():
        lines = [CheckLine(where, *words) for words, where in run.gathered(own)]
        found.append(CheckGroup(*key, tuple(sorted(lines, key=lambda line: line.status == PASS))))
    return tuple(found)


def count(n: int, what: str) -> str:
    """`1 cell`, `2 cells`"""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def check_name(check: str, variant: str) -> str:
    """The check with its variant, unless its name has it already."""
    return f"{check} ({variant})" if variant and variant not in check else check


def places(labels: Sequence[Label], most: int, text: Callable[[str], str] = str) -> str:
    """`native (4 cells); int8_sym · batch 1 and 2 more cells`. text: escapes a label's text."""
    names = [place(label, text) for label in labels[:most]]
    rest = sum(len(label.cells) for label in labels[most:])
    return "; ".join(names) + (f" and {count(rest, 'more cell')}" if rest else "")


def place(label: Label, text: Callable[[str], str] = str) -> str:
    """`native (4 cells)`"""
    return text(label.text) + (f" ({len(label.cells)} cells)" if len(label.cells) > 1 else "")


def value_text(outcome: Outcome) -> str:
    """The value that a check judged, or "" when there was none."""
    if outcome.value is None:
        return NOT_MEASURED if outcome.metric and outcome.status == NOT_EVALUATED else ""
    return f"{NUMBER.number(outcome.value)}{_suffix(outcome)}"


def mde_text(outcome: Outcome) -> str:
    """The minimum detectable effect of a check, in its metric's unit; "" where nothing is estimated."""
    if outcome.mde is None:
        return ""
    return "none possible" if math.isinf(outcome.mde) else f"{outcome.mde:.3g}{_suffix(outcome)}"


def needed_text(outcome: Outcome) -> str:
    """`73 questions`; "" where the number is unknown, or the check passed."""
    if outcome.n_needed is None or outcome.status == PASS:
        return ""
    counted = METRICS[outcome.metric].counted if outcome.metric in METRICS else ""
    return f"{NUMBER.number(outcome.n_needed)} {counted_of(outcome.n_needed, counted)}".rstrip()


def _suffix(outcome: Outcome) -> str:
    return METRICS[outcome.metric].unit.suffix if outcome.metric in METRICS else ""
