"""Goals of a benchmark: a table says what is asked, and each is printed as reached, missed or not measured.

A goal is a mapping with `sentence`, `measure` (a name that the benchmark knows), and `at_least` or `at_most`;
what else it holds says where it applies, and is the benchmark's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Goal = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """The number of one entry at one cell; value None: not measured."""

    cell: str
    entry: str
    value: float | None
    reached: bool

    def __str__(self) -> str:
        return f"{self.cell} {self.entry} {'no number' if self.value is None else f'{self.value:.4g}'}"


def finding(goal: Goal, cell: str, entry: str, value: float | None) -> Finding:
    reached = value is not None and goal.get("at_least", -math.inf) <= value <= goal.get("at_most", math.inf)
    return Finding(cell, entry, value, reached)


def outcome(found: Sequence[Finding]) -> str:
    """ "missed" when any finding misses, "not measured" when one has no value, or there is none."""
    if any(f.value is not None and not f.reached for f in found):
        return "missed"
    return "not measured" if not found or any(f.value is None for f in found) else "reached"


def goal_lines(goals: Mapping[str, Goal], evaluate: Callable[[Goal], Sequence[Finding]]) -> list[str]:
    """One line a goal, with the number nearest to its limit (or farthest beyond), then one for each cell that
    misses.
    """
    lines = []
    for name, goal in goals.items():
        found = evaluate(goal)
        known = [f for f in found if f.value is not None]
        worst = (min if "at_least" in goal else max)(known, key=lambda f: f.value or 0.0, default=None)
        wanted = f">= {goal['at_least']}" if "at_least" in goal else f"<= {goal['at_most']}"
        number = f"; worst {worst}" if worst else ""
        lines.append(f"{name}: {outcome(found)}. {goal['sentence']} ({goal['measure']} {wanted}{number})")
        lines += [f"    misses at {f}" for f in known if not f.reached]
        lines += [f"    {f}" for f in found if f.value is None]
    return lines


def as_json(goals: Mapping[str, Goal], evaluate: Callable[[Goal], Sequence[Finding]]) -> dict[str, Any]:
    return {
        name: {
            "sentence": goal["sentence"],
            "outcome": outcome(found := evaluate(goal)),
            "findings": [vars(f) for f in found],
        }
        for name, goal in goals.items()
    }


def chosen(given: str, known: Iterable[str], what: str) -> list[str]:
    """The names of a comma-separated list; SystemExit for one that is not known."""
    names = [name for name in given.split(",") if name]
    known = list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"{what} {name!r} is unknown; choose from {', '.join(known)}.")
    return names
