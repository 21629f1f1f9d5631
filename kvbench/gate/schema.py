"""JSON Schema (draft 2020-12) of gate files."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.matrix.schema import DIALECT, Schema, cell_key, mapping
from kvbench.metrics import collect as metrics
from kvbench.metrics.declare.metric import Metric
from kvbench.records.record import RUNGS


def gate_schema() -> Schema:
    """The schema of `gates/*.yaml`."""
    number = {"type": "number"}
    where = {key: cell_key(key) for key in CELL_OPTIONS} | {
        "model": {"type": "string", "description": CELL_OPTIONS["model"].help},
        "variant": {
            "type": "string",
            "description": 'corpus or question set with its protocol: "wikitext2 stream512"',
        },
    }
    equals: dict[str, Schema] = {"value": number, "tolerance": {"type": "number", "minimum": 0}}
    check: dict[str, Schema] = {
        "metric": _metric(),
        "where": {
            **mapping(where),
            "description": "the cells it is asked of: every key must agree; all when left out",
        },
        "at_most": {**number, "description": "passes when the whole interval is at or below"},
        "at_least": {**number, "description": "passes when the whole interval is at or above"},
        "equals": {
            "anyOf": [number, {**mapping(equals), "required": ["value"]}],
            "description": "a value, or {value:, tolerance:}",
        },
        "within": {
            "type": "array",
            "prefixItems": [number, number],
            "items": False,
            "minItems": 2,
            "description": "[low, high]",
        },
        "required": {"type": "boolean", "default": True, "description": "false: it may stay unevaluated"},
        "why": {"type": "string", "description": "where the limit comes from; printed with the outcome"},
    }
    predicates = ("at_most", "at_least", "equals", "within")
    properties: dict[str, Schema] = {
        "name": {"type": "string", "description": "the gate's name; by default the file's"},
        "allow_partial": {
            "type": "boolean",
            "default": False,
            "description": "whether limited or quick results may satisfy checks",
        },
        "allow_fallback": {
            "type": "boolean",
            "default": False,
            "description": "whether a declared fallback may pass the precision check",
        },
        "evidence": {
            "enum": list(RUNGS),
            "default": RUNGS[-1],
            "description": "the highest rung of the evidence that must be verified, with all below it; a mismatch of any fails",
        },
        "checks": {
            "type": "array",
            "minItems": 1,
            "description": "what is asked; the precision check comes first on its own",
            "items": {
                **mapping(check),
                "required": ["metric"],
                "oneOf": [{"required": [predicate]} for predicate in predicates],
            },
        },
    }
    return {"$schema": DIALECT, "title": "kvbench gate", **mapping(properties), "required": ["checks"]}


def _metric() -> Schema:
    table: Mapping[str, Metric] = getattr(metrics, "METRICS", {})
    known = "; ".join(f"{m.name} ({m.unit}): {m.definition}" for m in table.values())
    return {"type": "string", "enum": list(table), "description": known} if table else {"type": "string"}
