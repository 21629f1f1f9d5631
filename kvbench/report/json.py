"""The run as one JSON object, for `--json` and `results.json`, and its schema: strict JSON, without NaN.

A value that is NaN is null with the note "NaN"; null without such a note was not measured.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, NOT_JUDGED, PASS, REASONS, Outcome
from kvbench.matrix.cells import Cell
from kvbench.matrix.schema import Schema
from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.units import non_finite
from kvbench.records import schema as s
from kvbench.report.model import JudgedRun, model_digests, verdict_word
from kvbench.report.sections.precision import PrecisionLine, precision_lines

RESULTS_VERSION = 1  # docs/report.md


def result_json(run: JudgedRun) -> dict[str, Any]:
    """Keys: schema, run, cells, rows, outcomes, verdict, exit_code."""
    run = run.with_fact_rows()
    lines = {line.label.cells[0]: line for line in precision_lines(run)}
    return {
        "schema": RESULTS_VERSION,
        "run": _run(run),
        "cells": [_cell(cell, lines[cell.id]) for cell in run.manifest.cells],
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
    """looks: of runners with several; decided: what decided the verdict early; not_run: tasks left out."""
    looks = {}
    for runner, look in run.manifest.looks.items():
        plan = (run.manifest.until_decided or {})[runner]
        place = {"look": look.number, "of": look.of, "level": look.confidence}
        looks[runner] = {"option": plan.option, "sizes": strict(plan.sizes), **place}
    stopped = run.manifest.stopped
    decided = {"check": stopped.check, "after": stopped.after} if stopped else None
    return {"looks": looks, "decided": decided, "not_run": _not_run(run)}


def _not_run(run: JudgedRun) -> list[dict[str, Any]]:
    return [{"runner": t.runner, "variant": t.variant, "cells": list(t.cells)} for t in run.run.missing()]


def _cell(cell: Cell, line: PrecisionLine) -> dict[str, Any]:
    precision = {key: getattr(line, key) for key in ("storage", "transfer", "execution")}
    return {
        **{key: getattr(cell, key) for key in ("id", "name", "baseline")},
        "spec": strict(cell.spec),
        "choices": {choice.aspect: asdict(choice) for choice in line.choices},
        "effective": line.effective,
        "effective_weights": line.effective_weights,
        "precision": {**precision, "weights": line.stored_weights, "gemm": line.products},
        "evidence": {"state": line.state, "levels": [asdict(level) for level in line.levels]},
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    found = asdict(outcome)
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
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def results_schema() -> Schema:
    """JSON Schema (draft 2020-12) of `results.json`, which `run`, `gate` and `report` print with `--json`."""

    def texts(*names: str) -> dict[str, Schema]:
        return dict.fromkeys(names, s.TEXT)

    row: dict[str, Schema] = {
        **texts("cell", "variant", "unit", "note"),
        **dict.fromkeys(("low", "high"), s.NUMBER_OR_NULL),
        **dict.fromkeys(("baseline", "partial"), s.TEXT_OR_NULL),
        "metric": {"enum": list(METRICS)},
        "value": s.described(s.NUMBER_OR_NULL, "null: not measured, or NaN (see the note)"),
        "n": s.described(s.COUNT_OR_NULL, "samples"),
        "units": s.described(s.NUMBER_OR_NULL, "independent units of the interval"),
    }
    mde = "minimum detectable effect: distance from the limit, in the value's unit"
    bounds = s.described(s.ENDS, "the limit as numbers, low and high; null: no limit on that side")
    outcome: dict[str, Schema] = {
        **texts("check", "variant", "sentence", "look"),
        **dict.fromkeys(("value", "level"), s.NUMBER_OR_NULL),
        "metric": s.described(s.TEXT, "empty if the check is not about a metric"),
        "cell": s.TEXT_OR_NULL,
        "cells": s.TEXTS,
        "status": {"enum": [PASS, FAIL, INCONCLUSIVE, NOT_EVALUATED]},
        "reason": s.described({"enum": list(REASONS)}, "why the outcome has its status"),
        "limit": s.described(s.TEXT, "as text"),
        "required": {"type": "boolean"},
        "why": s.described(s.TEXT, "the gate's reason for the limit"),
        "mde": s.described(s.NUMBER_OR_NULL, mde),
        "n_needed": s.described(s.COUNT_OR_NULL, "samples that would decide at the observed value"),
        "bounds": s.or_null(bounds),
    }
    cell: dict[str, Schema] = {
        **texts("id", "name", "baseline", "effective", "effective_weights"),
        **dict.fromkeys(("spec", "choices"), s.OBJECT),
        "precision": s.mapping(texts("storage", "transfer", "execution", "weights", "gemm")),
        "evidence": s.mapping({"state": s.TEXT, "levels": {"type": "array", "items": s.OBJECT}}),
    }
    stopped = {"type": "object", "required": ["by", "check", "after", "not_run"]}
    always: dict[str, Schema] = {
        **texts("name", "created_at"),
        "command": s.TEXTS,
        "environment": s.OBJECT,
        "gate": s.described(s.TEXT_OR_NULL, "path of the gate"),
        "matrix": s.mapping({"path": s.TEXT_OR_NULL, "sha": s.SHA}),
        "model_digests": s.described(s.TEXT, "digests of the models; empty if an old run has none"),
        "tasks": s.COUNT,
        "records": s.described({"type": "object", "additionalProperties": s.COUNT}, "count by status"),
        "partial": {"type": "boolean"},
    }
    early = {"until_decided": s.OBJECT, "stopped": s.described(stopped, "only with --canary")}
    judged = s.whole(outcome, Outcome)
    judged["properties"]["note"] = s.described(s.TEXT, "which of its numbers is not finite")
    parts: dict[str, Schema] = {
        "schema": {"const": RESULTS_VERSION},
        "run": {**s.mapping({**always, **early}), "required": list(always)},
        "cells": {"type": "array", "items": s.mapping(cell)},
        "rows": {"type": "array", "items": s.whole(row, Row)},
        "outcomes": {"type": "array", "items": judged},
        "verdict": {"enum": [PASS, FAIL, INCONCLUSIVE, NOT_EVALUATED, NOT_JUDGED]},
        "exit_code": {"enum": [0, 1, 3, 4]},
    }
    return s.document("kvbench results", s.mapping(parts))
