"""Stored runs that `compare` and `history` read: folders -> runs with names, and the cells and metrics that
are asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import UsageError

if TYPE_CHECKING:
    from kvbench.compare.pairing import Stored


def stored(path: Path, name: str) -> Stored:
    """The run in a folder. Raises UsageError for a folder that is not a run."""
    from kvbench.compare.pairing import Stored
    from kvbench.records.run import RunDir

    return Stored(name, str(path), RunDir(path).load())


def chosen_cells(runs: Sequence[Stored], expression: str | None) -> list[Collection[str] | None]:
    """The ids of each run's cells for which -k holds, with their baselines. UsageError where the first run
    has none."""
    from kvbench.matrix.cells import CELL_KEYS
    from kvbench.matrix.select import select

    if expression is None:
        return [None] * len(runs)
    found: list[Collection[str] | None] = []
    for run in runs:
        cells = [replace(cell, spec={**CELL_KEYS, **cell.spec}) for cell in run.run.cells.values()]
        try:
            found.append({cell.id for cell in select(cells, expression)})
        except UsageError:
            if not found:
                raise
            found.append(())
    return found


def check_options(only: Sequence[str], margin: float | None, *outputs: Path | None) -> None:
    """Raises UsageError for an unknown metric, a margin out of range, or a file that cannot be written."""
    from kvbench.metrics.collect import METRICS
    from kvbench.text import suggestion

    for metric in only:
        if metric not in METRICS:
            raise UsageError(
                f"--only {metric!r:.80} is not a metric.{suggestion(metric, METRICS)} "
                f"docs/reference/metrics.md lists "
                "all of them, for example itl_ms, ppl, kld_mean, mcq_accuracy, kv_bytes_total."
            )
    if margin is not None and not 0 <= margin < 100:
        raise UsageError(f"--margin-pct {margin:g}: expected a number from 0 to 100, as in --margin-pct 1.")
    for path in outputs:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{path} cannot be written: give the name of a file in a folder that exists.")
