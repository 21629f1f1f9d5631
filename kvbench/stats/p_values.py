"""Exact p-values of paired picks, and Holm's correction of several p-values. Pure functions."""

from collections.abc import Sequence


def mcnemar_p(b: int, c: int) -> float:
    """Exact two-sided McNemar p-value of discordant counts b and c: a binomial test against 1/2."""
    from scipy.special import bdtr

    return min(1.0, 2.0 * float(bdtr(min(b, c), b + c, 0.5))) if b + c else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the input's order (Holm 1979): rejecting at or below alpha makes any false
    rejection at most alpha likely, whatever the dependence."""
    adjusted, worst = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted
