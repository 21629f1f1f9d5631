"""JSON Schema (draft 2020-12) of results.json."""

from __future__ import annotations

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_JUDGED, PASS, REASONS, Outcome
from kvbench.gate.verdict import NOT_EVALUATED as NOT_MEASURED
from kvbench.matrix.schema import Schema
from kvbench.metrics.collect import METRICS, Row
from kvbench.records.schema import (
    COUNT,
    COUNT_OR_NULL,
    ENDS,
    NUMBER_OR_NULL,
    OBJECT,
    SHA,
    TEXT,
    TEXT_OR_NULL,
    TEXTS,
    described,
    document,
    mapping,
    or_null,
    whole,
)
from kvbench.report.json import RESULTS_VERSION


def results_schema() -> Schema:
    """The schema of `results.json` and of what `run`, `gate` and `report` print with `--json`."""
    row: dict[str, Schema] = {
        "cell": TEXT,
        "metric": {"enum": list(METRICS)},
        "variant": TEXT,
        "value": described(NUMBER_OR_NULL, "null: not measured, or NaN (see the note)"),
        "unit": TEXT,
        "n": described(COUNT_OR_NULL, "samples"),
        "low": NUMBER_OR_NULL,
        "high": NUMBER_OR_NULL,
        "baseline": TEXT_OR_NULL,
        "partial": TEXT_OR_NULL,
        "note": TEXT,
        "units": described(NUMBER_OR_NULL, "independent units of the interval"),
    }
    outcome: dict[str, Schema] = {
        "check": TEXT,
        "metric": described(TEXT, "empty if the check is not about a metric"),
        "cell": TEXT_OR_NULL,
        "variant": TEXT,
        "status": {"enum": [PASS, FAIL, INCONCLUSIVE, NOT_MEASURED]},
        "reason": described({"enum": list(REASONS)}, "why the outcome has its status"),
        "value": NUMBER_OR_NULL,
        "limit": described(TEXT, "as text"),
        "sentence": TEXT,
        "required": {"type": "boolean"},
        "why": described(TEXT, "the gate's reason for the limit"),
        "cells": TEXTS,
        "mde": described(
            NUMBER_OR_NULL, "minimum detectable effect: distance from the limit, in the value's unit"
        ),
        "n_needed": described(COUNT_OR_NULL, "samples that would decide at the observed value"),
        "look": TEXT,
        "level": NUMBER_OR_NULL,
        "bounds": or_null(described(ENDS, "the limit as numbers, low and high; null: no limit on that side")),
    }
    cell: dict[str, Schema] = {
        "id": TEXT,
        "name": TEXT,
        "baseline": TEXT,
        "spec": OBJECT,
        "choices": OBJECT,
        "effective": TEXT,
        "effective_weights": TEXT,
        "precision": mapping(dict.fromkeys(("storage", "transfer", "execution", "weights", "gemm"), TEXT)),
        "evidence": mapping({"state": TEXT, "levels": {"type": "array", "items": OBJECT}}),
    }
    run: dict[str, Schema] = {
        "name": TEXT,
        "created_at": TEXT,
        "command": TEXTS,
        "environment": OBJECT,
        "gate": described(TEXT_OR_NULL, "path of the gate"),
        "matrix": mapping({"path": TEXT_OR_NULL, "sha": SHA}),
        "model_digests": described(TEXT, "digests of the models; empty if an old run has none"),
        "tasks": COUNT,
        "records": described({"type": "object", "additionalProperties": COUNT}, "count by status"),
        "partial": {"type": "boolean"},
        "until_decided": OBJECT,
        "stopped": described(
            {"type": "object", "required": ["by", "check", "after", "not_run"]}, "only with --canary"
        ),
    }
    judged = whole(outcome, Outcome)
    judged["properties"]["note"] = described(TEXT, "which of its numbers is not finite")
    parts: dict[str, Schema] = {
        "schema": {"const": RESULTS_VERSION},
        "run": {**mapping(run), "required": [key for key in run if key not in ("until_decided", "stopped")]},
        "cells": {"type": "array", "items": mapping(cell)},
        "rows": {"type": "array", "items": whole(row, Row)},
        "outcomes": {"type": "array", "items": judged},
        "verdict": {"enum": [PASS, FAIL, INCONCLUSIVE, NOT_MEASURED, NOT_JUDGED]},
        "exit_code": {"enum": [0, 1, 3, 4]},
    }
    return document("kvbench results", mapping(parts))
