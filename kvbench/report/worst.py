"""The outcomes that decide the exit code, gravest first: what a summary, an annotation or a card has room for."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.report.model import OutcomeLike

# What each status does to the exit code, gravest first: 1, then 4, then 3.
_ORDER = ("fail", "inconclusive", "not_evaluated")


def counts(outcome: OutcomeLike) -> bool:
    """Whether an outcome keeps the exit code from being 0 (`kvbench.verdict.exit_code_of`)."""
    return outcome.status in ("fail", "inconclusive") or (
        outcome.status == "not_evaluated" and outcome.required
    )


def worst(outcomes: Iterable[OutcomeLike]) -> list[OutcomeLike]:
    """Failures, then what is inconclusive, then what was not evaluated and had to be; the gate's order within each."""
    return sorted(filter(counts, outcomes), key=lambda outcome: _ORDER.index(outcome.status))
