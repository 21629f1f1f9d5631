"""The run as one JSON object, for `--json` and `results.json`: strict JSON, without NaN.

A value that is NaN is null with the note "NaN"; null without such a note was not measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvbench.gate.verdict import Outcome
from kvbench.matrix.cells import Cell
from kvbench.metrics.declare.units import non_finite
from kvbench.render.labels import Labels
from kvbench.report.model import JudgedRun, model_digests, verdict_word
from kvbench.report.sections.precision import PrecisionLine, precision_lines

RESULTS_VERSION = 1  # docs/report.md


def result_json(run: JudgedRun) -> dict[str, Any]:
    """Keys: schema, run, cells, rows, outcomes, verdict, exit_code."""
    run = run.with_fact_rows()
    labels = Labels(run.run)
    lines = {line.label.cells[0]: line for line in precision_lines(run, labels)}
    return {
        "schema": RESULTS_VERSION,
        "run": _run(run),
        "cells": [_cell(cell, lines[cell.id]) for cell in labels.cells.values()],
        "rows": [_numbers(asdict(row) | {"unit": row.unit.name}, "value", "low", "high") for row in run.rows],
        "outcomes": [_numbers(_outcome(outcome), "value", "mde") for outcome in run.verdict.outcomes],
        "verdict": verdict_word(run),
        "exit_code": run.verdict.exit_code,
    }


def _run(run: JudgedRun) -> dict[str, Any]:
    manifest = run.manifest
    kept = {key: getattr(manifest, key) for key in ("name", "created_at", "command", "environment", "gate")}
    early: dict[str, Any] = {}
    if manifest.until_decided is not None:
        early = {"until_decided": _until_decided(run)}
    elif manifest.stopped:
        early = {"stopped": {**asdict(manifest.stopped), "not_run": _not_run(run)}}
    return {
        **strict(kept),
        "matrix": {"path": manifest.matrix.path, "sha": manifest.matrix.sha},
        "model_digests": model_digests(manifest.tasks),
        "tasks": len(manifest.tasks),
        "records": dict(Counter(record.status for record in run.records)),
        "partial": any(record.partial is not None for record in run.records),
        **early,
    }


def _until_decided(run: JudgedRun) -> dict[str, Any]:
    """looks: the runners with several looks, with number and level; decided: what decided the verdict early;
    not_run: the tasks that were left out.
    """
    looks = {}
    for runner, look in run.manifest.looks.items():
        plan = (run.manifest.until_decided or {})[runner]
        place = {"look": look.number, "of": look.of, "level": look.confidence}
        looks[runner] = {"option": plan.option, "sizes": plan.sizes, **place}
    stopped = run.manifest.stopped
    decided = {"check": stopped.check, "after": stopped.after} if stopped else None
    found = {"looks": looks, "decided": decided, "not_run": _not_run(run)}
    return {key: strict(value) for key, value in found.items()}


def _not_run(run: JudgedRun) -> list[dict[str, Any]]:
    return [{"runner": t.runner, "variant": t.variant, "cells": list(t.cells)} for t in run.run.missing()]


def _cell(cell: Cell, line: PrecisionLine) -> dict[str, Any]:
    return {
        "id": cell.id,
        "name": cell.name,
        "baseline": cell.baseline,
        "spec": strict(cell.spec),
        "choices": {choice.aspect: asdict(choice) for choice in line.choices},
        "effective": line.effective,
        "effective_weights": line.effective_weights,
        "precision": {
            "storage": line.storage,
            "transfer": line.transfer,
            "execution": line.execution,
            "weights": line.stored_weights,
            "gemm": line.products,
        },
        "evidence": {"state": line.state, "levels": [asdict(level) for level in line.levels]},
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    found = {**asdict(outcome), "cell": outcome.cell}
    if outcome.bounds:  # an open end is null
        found["bounds"] = [end if math.isfinite(end) else None for end in outcome.bounds]
    return found


def _numbers(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The data with non-finite numbers under `keys` as null, and a note that names them."""
    notes = [data["note"]] if data.get("note") else []
    for key in keys:
        value = data[key]
        if isinstance(value, float) and not math.isfinite(value):
            data[key] = None
            notes.append(non_finite(value) if key == "value" else f"{key}: {non_finite(value)}")
    if notes:
        data["note"] = "; ".join(notes)
    return {key: strict(value) for key, value in data.items()}


def strict(value: Any) -> Any:
    """Any value as strict JSON; a non-finite number becomes its word."""
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
