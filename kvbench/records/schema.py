"""JSON Schemas (draft 2020-12) of record and manifest (run.json); docs/reference/schema.md lists the keys.

Made from the dataclasses, so that a new field cannot be forgotten. Records hold NaN and infinities as
Python's JSON dialect writes them; results.json is strict.
"""

from dataclasses import fields
from typing import Any

from kvbench.matrix.cells import CELL_KEYS, Cell, Task
from kvbench.matrix.resolve_backend import ASPECTS, Choice
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.schema import DIALECT, Schema
from kvbench.records import record as records
from kvbench.records.record import LEVELS, SCHEMA_VERSION, STATES, Evidence, Level, Record
from kvbench.records.run import CANARY, UNTIL_DECIDED, Stopped

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
        "key": described(TEXT, "the task's content hash, and the file's name"),
        "runner": described({"enum": list(RUNNERS)}, "what measured it"),
        "protocol": described(COUNT, "version of the runner's rules"),
        "status": {"enum": [records.OK, records.ERROR, records.REFUSED, records.NOT_EVALUATED]},
        "spec": described(OBJECT, "the cell keys that the task depends on, expanded"),
        "options": described(OBJECT, "the runner's options, expanded"),
        "decision": described(
            or_null(_decision()), "requested and resolved, an aspect each; null: not taken"
        ),
        "evidence": described(or_null(_evidence()), "what ran; null: nothing shows it"),
        "samples": described(OBJECT, "raw samples by name; every statistic is computed from them on reading"),
        "facts": described(OBJECT, "counts, digests and protocol facts"),
        "environment": described(OBJECT, "machine, versions and load"),
        "partial": described(TEXT_OR_NULL, "why it covers less than the whole; null: it does not"),
        "error": described(error, "why it is not ok"),
        "started_at": described(TEXT, "UTC, ISO 8601"),
        "seconds": described({"type": "number", "minimum": 0}, "wall time by a monotonic clock"),
        "schema": {"const": SCHEMA_VERSION},
    }
    return document("kvbench record", whole(parts, Record))


def manifest_schema() -> Schema:
    """The schema of `run.json`."""
    spec = {"type": "object", "required": list(CELL_KEYS)}
    cell: dict[str, Schema] = {
        "id": TEXT,
        "name": described(TEXT, "the keys that vary, in the matrix's order"),
        "spec": described(spec, "every key of a cell"),
        "varied": TEXTS,
        "baseline": described(TEXT, "id of the native cell it is compared with, or its own"),
        "line": described(
            {**COUNT_OR_NULL, "minimum": 1}, "line in the matrix; null: added, or set by --set"
        ),
    }
    task: dict[str, Schema] = {
        "key": TEXT,
        "runner": {"enum": list(RUNNERS)},
        "variant": described(TEXT, "corpus or question set with its protocol, or empty"),
        "spec": OBJECT,
        "options": OBJECT,
        "cells": {**TEXTS, "minItems": 1},
        "baseline": described(TEXT_OR_NULL, "key of the same work on the baseline"),
        "digests": described(
            OBJECT, "of the contents of model, native model and data; empty where not recorded"
        ),
    }
    tasks = {**whole(task, Task), "required": [key for key in task if key != "digests"]}
    matrix = mapping({"path": TEXT_OR_NULL, "sha": SHA, "source": OBJECT})
    share: dict[str, Schema] = {"number": COUNT, "of": COUNT, "tasks": TEXTS}
    merged: dict[str, Schema] = {"of": {"type": "array", "items": OBJECT}, "differences": TEXTS}
    stopped: dict[str, Schema] = {
        "by": described({"enum": [CANARY, UNTIL_DECIDED]}, "the option that stopped it"),
        "check": described(TEXT, "the check that did not pass"),
        "after": described(TEXT, "the step after which it did not pass"),
    }
    parts: dict[str, Schema] = {
        "schema": {"const": SCHEMA_VERSION},
        "name": TEXT,
        "matrix": described(matrix, "source: the file's data, with what --set changed"),
        "command": TEXTS,
        "created_at": described(TEXT, "UTC, ISO 8601"),
        "environment": OBJECT,
        "cells": {"type": "array", "items": whole(cell, Cell)},
        "tasks": {"type": "array", "items": tasks},
        "gate": described(TEXT_OR_NULL, "path of the gate that the matrix names"),
        "until_decided": described({"type": "object", "required": ["looks"]}, "of --until-decided only"),
        "shard": described(mapping(share), "of --shard only: what this shard measures"),
        "merged": described(mapping(merged), "of kvbench merge only"),
        "stopped": described(whole(stopped, Stopped), "of a run that left tasks out"),
    }
    optional = ("until_decided", "shard", "merged", "stopped")
    required = [key for key in parts if key not in optional]
    return document("kvbench manifest", {**mapping(parts), "required": required})


def _decision() -> Schema:
    pair = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}
    choice: dict[str, Schema] = {
        "requested": TEXT,
        "resolved": TEXT,
        "reason": described(TEXT, "a stable word"),
        "rejected": described({"type": "array", "items": pair}, "(option, reason), in the order tried"),
        "sentence": TEXT,
    }
    return mapping({aspect: whole(choice, Choice) for aspect in ASPECTS})


def _evidence() -> Schema:
    level: dict[str, Schema] = {
        "name": described({"enum": [*LEVELS, "native-arm"]}, "the level"),
        "state": {"enum": list(STATES)},
        "sentence": TEXT,
        "facts": OBJECT,
    }
    parts: dict[str, Schema] = {
        "effective": described(TEXT, "KV format that the evidence shows, or mixed, or unknown"),
        "effective_weights": TEXT,
        "levels": {"type": "array", "items": whole(level, Level)},
        "precision": described({"type": "object", "additionalProperties": TEXT}, "dtypes by place"),
        "reads": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    return whole(parts, Evidence)


def whole(parts: dict[str, Schema], of: type[Any]) -> Schema:
    """The schema of all fields of a dataclass. A field without an entry fails when the schema is made."""
    unlike = set(parts).symmetric_difference(f.name for f in fields(of))
    assert not unlike, unlike
    return mapping(parts)


def mapping(parts: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def document(title: str, schema: Schema) -> Schema:
    return {"$schema": DIALECT, "title": title, **schema}
