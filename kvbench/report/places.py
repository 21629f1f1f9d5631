"""The file and line of the matrix or gate that an outcome belongs to.

A cell's line is in the manifest: its format among the axes, or its `include` entry. An outcome of a cell
without a line, such as an added baseline, belongs to the runner that measured it. An outcome without a cell
belongs to its check in the gate. If the matrix has changed since the run, no line is named.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate.verdict import Outcome
from kvbench.matrix.document import Document
from kvbench.metrics.collect import METRICS
from kvbench.report.model import JudgedRun


@dataclass(frozen=True)
class Place:
    """path: relative to the repository, with `/`; line: from 1, None if unknown."""

    path: str
    line: int | None


def places_of(run: JudgedRun, gate: Any, root: Path, cwd: Path) -> dict[int, Place | None]:
    """The place of each outcome, by its `id`. root: the repository; cwd: the base of the manifest's paths."""
    matrix = run.manifest.matrix
    path, same = _file(matrix.path, matrix.sha, cwd)
    document = _read(path) if path and same else None
    lines = {cell.id: cell.line for cell in run.manifest.cells} if same else {}
    checks = {check.name: check.line for check in gate.checks} if gate else {}
    gate_path, _ = _file(gate.path if gate else None, None, cwd)

    def place(outcome: Outcome) -> Place | None:
        if not outcome.cells and gate_path and outcome.check in checks:
            return Place(_relative(gate_path, root), checks[outcome.check])
        if path is None:
            return None
        line = next((lines[cell] for cell in outcome.cells if lines.get(cell)), None)
        return Place(_relative(path, root), line or _runner_line(document, outcome))

    return {id(outcome): place(outcome) for outcome in run.verdict.outcomes}


def _file(path: object, sha: object, cwd: Path) -> tuple[Path | None, bool]:
    """The file, None if it does not exist, and whether it still has that digest."""
    if not path:
        return None, False
    here = cwd / Path(str(path))
    try:
        raw = here.read_bytes()
    except (OSError, ValueError):
        return None, False
    return here, hashlib.sha256(raw).hexdigest() == sha


def _read(path: Path) -> Document | None:
    from kvbench.matrix import yaml as yamlstrict

    try:
        return yamlstrict.read(path)
    except UsageError:
        return None


def _runner_line(document: Document | None, outcome: Outcome) -> int | None:
    """The line of the runner that measured the metric, or of `runners`."""
    if document is None:
        return None
    metric = METRICS.get(outcome.metric)
    at = ("runners", metric.runner) if metric else ("runners",)
    return document.mark(at, key=True)[0] or None


def _relative(path: Path, root: Path) -> str:
    """The path relative to the repository; a file outside it keeps its own path."""
    whole, base = path.resolve(), root.resolve()
    return (whole.relative_to(base) if whole.is_relative_to(base) else whole).as_posix()
