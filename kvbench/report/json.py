"""The run as one JSON object, for `--json` and `results.json`: strict JSON, so no NaN in it.

A value that came out as NaN is null with the note "NaN"; null without such a note was not measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import non_finite
from kvbench.records.record import Record
from kvbench.render.labels import Labels
from kvbench.report.model import OutcomeLike, Run, VerdictLike, model_digests, verdict_word
from kvbench.report.sections.precision import PrecisionLine, precision_lines
from kvbench.stats.sequential import looks_of

RESULTS_VERSION = 1  # docs/report.md

# fmt: off
_OUTCOME_KEYS = ("check", "metric", "cell", "cells", "variant", "status", "value", "limit", "sentence", "required", "why",
                 "mde", "n_needed", "look", "level", "bounds")
# fmt: on


def result_json(manifest: Mapping[str, Any], records: Sequence[Record], rows: Sequence[Row],
                verdict: VerdictLike) -> dict[str, Any]:  # fmt: skip
    """Keys: schema, run, cells, rows, outcomes, verdict, exit_code."""
    run = Run(manifest, records, rows, verdict).with_fact_rows()
    labels = Labels(run.manifest)
    lines = {line.label.cells[0]: line for line in precision_lines(run, labels)}
    return {
        "schema": RESULTS_VERSION,
        "run": _run(run),
        "cells": [_cell(cell, lines[cell["id"]]) for cell in labels.cells.values()],
        "rows": [
            _numbers(asdict(row) | {"unit": row.unit.name}, ("value", "low", "high")) for row in run.rows
        ],
        "outcomes": [
            _numbers(_outcome(outcome), ("value", "limit", "mde")) for outcome in run.verdict.outcomes
        ],
        "verdict": verdict_word(run),
        "exit_code": run.verdict.exit_code,
    }


def _run(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    kept = {key: manifest.get(key) for key in ("name", "created_at", "command", "environment", "gate")}
    matrix = {key: manifest["matrix"].get(key) for key in ("path", "sha")}
    escalated = {"until_decided": _until_decided(run)} if manifest.get("until_decided") else {}
    return {
        **strict(kept),
        "matrix": matrix,
        "model_digests": model_digests(run.manifest),
        "tasks": len(manifest["tasks"]),
        "records": dict(Counter(record.status for record in run.records)),
        "partial": any(record.partial is not None for record in run.records),
        **escalated,
    }


def _until_decided(run: Run) -> dict[str, Any]:
    """looks: the runners that were judged as their samples grew, with look and level; decided: what made the rest needless;
    not_run: the tasks that it left out."""
    planned, done = run.manifest["until_decided"], {record.key for record in run.records}
    looks = {
        runner: {**planned["looks"][runner], "look": look.number, "of": look.of, "level": look.confidence}
        for runner, look in looks_of(run.manifest).items()
    }
    left = [
        {"runner": task["runner"], "variant": task["variant"], "cells": task["cells"]}
        for task in run.manifest["tasks"]
        if task["key"] not in done
    ]
    found = {"looks": looks, "decided": planned["decided"], "not_run": left}
    return {key: strict(value) for key, value in found.items()}


def _cell(cell: Mapping[str, Any], line: PrecisionLine) -> dict[str, Any]:
    return {
        "id": cell["id"],
        "name": cell["name"],
        "baseline": cell["baseline"],
        "spec": strict(cell["spec"]),
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


def _outcome(outcome: OutcomeLike) -> dict[str, Any]:
    found = {key: getattr(outcome, key) for key in _OUTCOME_KEYS}
    if found["bounds"] is not None:  # an open end is null
        found["bounds"] = [end if math.isfinite(end) else None for end in found["bounds"]]
    return found


def _numbers(data: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Non-finite numbers under `keys` become null, and the note says which word each of them was."""
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
    """Any value as strict JSON; elsewhere than in rows and outcomes a non-finite number is its word."""
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
