"""Metrics: named with their unit, derived from records on reading, paired with their baselines.

Adding a metric: one entry in `METRICS` and one line in the runner's `derive_*` function below.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """better: "lower", "higher" or "" (no direction). plausible: closed interval outside which a value is a fault."""

    name: str
    unit: str
    better: str
    definition: str
    plausible: tuple[float, float] | None = None


@dataclass(frozen=True)
class Row:
    """One value of one metric on one cell.

    value None: not measured (`note` says why); NaN stays NaN. low, high: 95% interval or None; n: samples behind it.
    variant: corpus or question set with its protocol words, or "". baseline: id of the cell it is compared with, for
    metrics that are differences, else None. partial: see Record.
    """

    cell: str
    metric: str
    variant: str
    value: float | None
    unit: str
    n: int | None = None
    low: float | None = None
    high: float | None = None
    baseline: str | None = None
    partial: str | None = None
    note: str = ""
