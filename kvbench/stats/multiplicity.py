"""Holm's step-down correction: what p-values of several tests of one claim are worth together."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: the k-th smallest of m times m - k + 1, never less than one before it, at most 1.

    Rejecting those at or below alpha rejects a true hypothesis with a probability of at most alpha over all m, whatever
    their dependence (Holm 1979).
    """
    m = len(p_values)
    adjusted = [1.0] * m
    worst = 0.0
    for rank, i in enumerate(sorted(range(m), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted
