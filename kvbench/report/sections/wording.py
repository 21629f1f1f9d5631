"""Short texts that several sections and outputs share: counts, places, values of outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvbench.gate.verdict import NOT_EVALUATED, PASS, Outcome
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.units import NUMBER
from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED, counted_of


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
