"""JSON Schemas (draft 2020-12) of what a run leaves: record, manifest (run.json) and results.json; docs/schema.md explains them.

Made from the dataclasses, so that a field that is added is in them. They are of the newest version; older records are lifted
on reading (`kvbench.upgrade`). Records hold NaN and infinities as Python's JSON dialect writes them; results.json is strict.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvbench.cells import CELL_KEYS, Cell, Task
from kvbench.decision import ASPECTS, Choice
from kvbench.metrics import METRICS, Row
from kvbench.record import (
    ERROR,
    LEVELS,
    MISMATCH,
    NOT_APPLICABLE,
    NOT_EVALUATED,
    OK,
    REFUSED,
    SCHEMA_VERSION,
    UNVERIFIED,
    VERIFIED,
    Evidence,
    Level,
    Record,
)
from kvbench.report.jsonout import RESULTS_VERSION
from kvbench.schema import DIALECT, Schema
from kvbench.tasks import RUNNERS
from kvbench.verdict import FAIL, INCONCLUSIVE, NOT_JUDGED, PASS, Outcome
from kvbench.verdict import NOT_EVALUATED as NOT_MEASURED

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"type": "array", "items": TEXT}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
COUNT_OR_NULL: Schema = {"type": ["integer", "null"], "minimum": 0}
ENDS: Schema = {"type": "array", "items": NUMBER_OR_NULL, "minItems": 2, "maxItems": 2}
SHA: Schema = {"type": "string", "pattern": "^([0-9a-f]{64})?$", "description": "sha256 of the file, hex"}


def record_schema() -> Schema:
    """The schema of `records/KEY.json`."""
    error = {"type": ["object", "null"], "properties": {"message": TEXT}, "required": ["message"]}
    parts: dict[str, Schema] = {
        "key": _said(TEXT, "the task's content hash, and the file's name"),
        "runner": _said({"enum": list(RUNNERS)}, "what measured it"),
        "protocol": _said(COUNT, "version of the runner's rules"),
        "status": {"enum": [OK, ERROR, REFUSED, NOT_EVALUATED]},
        "spec": _said(OBJECT, "the cell keys that the task depends on, expanded"),
        "options": _said(OBJECT, "the runner's options, expanded"),
        "decision": _said(_or_null(_decision()), "requested and resolved, an aspect each; null: not taken"),
        "evidence": _said(_or_null(_evidence()), "what ran; null: nothing shows it"),
        "samples": _said(OBJECT, "raw samples by name; every statistic is computed from them on reading"),
        "facts": _said(OBJECT, "counts, digests and protocol facts"),
        "environment": _said(OBJECT, "machine, versions and load"),
        "partial": _said(TEXT_OR_NULL, "why it covers less than the whole; null: it does not"),
        "error": _said(error, "why it is not ok"),
        "started_at": _said(TEXT, "UTC, ISO 8601"),
        "seconds": _said({"type": "number", "minimum": 0}, "wall time by a monotonic clock"),
        "schema": {"const": SCHEMA_VERSION},
    }
    return _document("kvbench record", _whole(parts, Record))


def manifest_schema() -> Schema:
    """The schema of `run.json`."""
    spec = {"type": "object", "required": list(CELL_KEYS)}
    cell: dict[str, Schema] = {
        "id": TEXT,
        "name": _said(TEXT, "the keys that vary, in the matrix's order"),
        "spec": _said(spec, "every key of a cell"),
        "varied": TEXTS,
        "baseline": _said(TEXT, "id of the native cell it is compared with, or its own"),
        "line": _said(
            {"type": ["integer", "null"], "minimum": 1}, "line in the matrix; null: added, or set by --set"
        ),
    }
    task: dict[str, Schema] = {
        "key": TEXT,
        "runner": {"enum": list(RUNNERS)},
        "variant": _said(TEXT, "corpus or question set with its protocol, or empty"),
        "spec": OBJECT,
        "options": OBJECT,
        "cells": {**TEXTS, "minItems": 1},
        "baseline": _said(TEXT_OR_NULL, "key of the same work on the baseline"),
        "digests": _said(OBJECT, "of the contents of model, native model and data; older runs have none"),
    }
    tasks = {**_whole(task, Task), "required": [key for key in task if key != "digests"]}
    matrix = _mapping({"path": TEXT_OR_NULL, "sha": SHA, "source": OBJECT})
    parts: dict[str, Schema] = {
        "schema": {"const": SCHEMA_VERSION},
        "name": TEXT,
        "matrix": _said(matrix, "source: the file's data, with what --set changed"),
        "command": TEXTS,
        "created_at": _said(TEXT, "UTC, ISO 8601"),
        "environment": OBJECT,
        "cells": {"type": "array", "items": _whole(cell, Cell)},
        "tasks": {"type": "array", "items": tasks},
        "gate": _said(TEXT_OR_NULL, "path of the gate that the matrix names"),
        "until_decided": _said({"type": "object", "required": ["looks", "decided"]}, "of --until-decided only"),
        "shard": _said(_mapping({"number": COUNT, "of": COUNT, "tasks": TEXTS}), "of --shard only: what this share measures"),
        "merged": _said(_mapping({"of": {"type": "array", "items": OBJECT}, "differences": TEXTS}), "of kvbench merge only"),
    }  # fmt: skip
    optional = ("until_decided", "shard", "merged")
    return _document(
        "kvbench manifest", {**_mapping(parts), "required": [k for k in parts if k not in optional]}
    )


def results_schema() -> Schema:
    """The schema of `results.json` and of what `run`, `gate` and `report` print with `--json`."""
    row: dict[str, Schema] = {
        "cell": TEXT,
        "metric": {"enum": list(METRICS)},
        "variant": TEXT,
        "value": _said(NUMBER_OR_NULL, "null: not measured, or no number (the note says NaN)"),
        "unit": TEXT,
        "n": _said(COUNT_OR_NULL, "samples"),
        "low": NUMBER_OR_NULL,
        "high": NUMBER_OR_NULL,
        "baseline": TEXT_OR_NULL,
        "partial": TEXT_OR_NULL,
        "note": TEXT,
        "units": _said(NUMBER_OR_NULL, "independent units that the interval is of"),
    }
    outcome: dict[str, Schema] = {
        "check": TEXT,
        "metric": _said(TEXT, "empty where it is about no metric"),
        "cell": TEXT_OR_NULL,
        "variant": TEXT,
        "status": {"enum": [PASS, FAIL, INCONCLUSIVE, NOT_MEASURED]},
        "value": NUMBER_OR_NULL,
        "limit": _said(TEXT, "in words"),
        "sentence": TEXT,
        "required": {"type": "boolean"},
        "why": _said(TEXT, "the gate's reason for the limit"),
        "cells": TEXTS,
        "mde": _said(NUMBER_OR_NULL, "minimum detectable effect, from the limit, in the value's unit"),
        "n_needed": _said(COUNT_OR_NULL, "samples that would decide at the value that was found"),
        "look": TEXT,
        "level": NUMBER_OR_NULL,
        "bounds": _or_null(_said(ENDS, "the limit as numbers, low and high; null is an open end")),
    }
    cell: dict[str, Schema] = {
        "id": TEXT,
        "name": TEXT,
        "baseline": TEXT,
        "spec": OBJECT,
        "choices": OBJECT,
        "effective": TEXT,
        "effective_weights": TEXT,
        "precision": _mapping(dict.fromkeys(("storage", "transfer", "execution", "weights", "gemm"), TEXT)),
        "evidence": _mapping({"state": TEXT, "levels": {"type": "array", "items": OBJECT}}),
    }
    run: dict[str, Schema] = {
        "name": TEXT,
        "created_at": TEXT,
        "command": TEXTS,
        "environment": OBJECT,
        "gate": _said(TEXT_OR_NULL, "path of the gate that judged"),
        "matrix": _mapping({"path": TEXT_OR_NULL, "sha": SHA}),
        "model_digests": _said(TEXT, "of the contents of the models; empty where an old run keeps none"),
        "tasks": COUNT,
        "records": _said({"type": "object", "additionalProperties": COUNT}, "how many ended how"),
        "partial": {"type": "boolean"},
        "until_decided": OBJECT,
    }
    judged = _whole(outcome, Outcome)
    judged["properties"]["note"] = _said(TEXT, "which of its numbers was no number")
    parts: dict[str, Schema] = {
        "schema": {"const": RESULTS_VERSION},
        "run": {**_mapping(run), "required": [key for key in run if key != "until_decided"]},
        "cells": {"type": "array", "items": _mapping(cell)},
        "rows": {"type": "array", "items": _whole(row, Row)},
        "outcomes": {"type": "array", "items": judged},
        "verdict": {"enum": [PASS, FAIL, INCONCLUSIVE, NOT_MEASURED, NOT_JUDGED]},
        "exit_code": {"enum": [0, 1, 3, 4]},
    }
    return _document("kvbench results", _mapping(parts))


def _decision() -> Schema:
    pair = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}
    choice: dict[str, Schema] = {
        "requested": TEXT,
        "resolved": TEXT,
        "reason": _said(TEXT, "a stable word"),
        "rejected": _said({"type": "array", "items": pair}, "(option, reason), in the order tried"),
        "sentence": TEXT,
    }
    return _mapping({aspect: _whole(choice, Choice) for aspect in ASPECTS})


def _evidence() -> Schema:
    level: dict[str, Schema] = {
        "name": _said({"enum": [*LEVELS, "native-arm"]}, "the level"),
        "state": {"enum": [VERIFIED, MISMATCH, UNVERIFIED, NOT_APPLICABLE]},
        "sentence": TEXT,
        "facts": OBJECT,
    }
    parts: dict[str, Schema] = {
        "effective": _said(TEXT, "KV format that the evidence shows, or mixed, or unknown"),
        "effective_weights": TEXT,
        "levels": {"type": "array", "items": _whole(level, Level)},
        "precision": _said({"type": "object", "additionalProperties": TEXT}, "dtypes by place"),
        "reads": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    return _whole(parts, Evidence)


def _whole(parts: dict[str, Schema], of: type[Any]) -> Schema:
    """Every field of a dataclass and no other: one that is added without a word here is an error at once."""
    assert set(parts) == {f.name for f in fields(of)}, set(parts).symmetric_difference(
        f.name for f in fields(of)
    )
    return _mapping(parts)


def _mapping(parts: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _said(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def _document(title: str, schema: Schema) -> Schema:
    return {"$schema": DIALECT, "title": title, **schema}
