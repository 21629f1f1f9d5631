"""JSON Schemas (draft 2020-12) of matrix and gate files, made from the tables that the loaders check against.

For editors: they complete keys and show what is accepted while the file is written. The loaders stay the judges; they
also see what no schema says (a static format without a scale, a key that is both varied and fixed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench import metrics
from kvbench.cellkeys import CELL_OPTIONS, MODEL_KEYS
from kvbench.formats import KV_FORMATS, WEIGHT_FORMATS
from kvbench.outline import SECTIONS
from kvbench.record import RUNGS
from kvbench.scales import WORDS
from kvbench.tasks import RUNNERS, Option, RunnerDecl

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
_MEANINGS = {
    "kv_format": {f.name: f.summary for f in KV_FORMATS.values()},
    "weights": {f.name: f.summary for f in WEIGHT_FORMATS.values()},
    "scale": WORDS,
}


def matrix_schema() -> Schema:
    """The schema of `matrices/*.yaml`."""
    cell = {key: _cell_key(key) for key in CELL_OPTIONS}
    axes = {key: _one_or_many(value) for key, value in cell.items()}
    sections: dict[str, Schema] = {
        "name": {"type": "string", "pattern": "^[a-z0-9_-]+$"},
        "model": cell["model"],
        "axes": {**_mapping(axes), "type": ["object", "null"]},
        "engine": {**_mapping({k: v for k, v in cell.items() if k != "model"}), "type": ["object", "null"]},
        "include": {"type": ["array", "null"], "items": {**_mapping(cell), "minProperties": 1}},
        "exclude": {"type": ["array", "null"], "items": {**_mapping(cell), "minProperties": 1}},
        "runners": {**_mapping({name: _runner(r) for name, r in RUNNERS.items()}), "minProperties": 1},
        "gate": {"type": ["string", "null"], "pattern": r"\S"},
    }
    properties: dict[str, Schema] = {
        name: {**section, "description": SECTIONS[name]} for name, section in sections.items()
    }
    return {
        "$schema": DIALECT,
        "title": "kvbench matrix",
        **_mapping(properties),
        "required": ["runners"],
        "anyOf": [{"required": ["axes"]}, {"required": ["include"]}],
    }


def gate_schema() -> Schema:
    """The schema of `gates/*.yaml`."""
    number = {"type": "number"}
    where = {key: _cell_key(key) for key in CELL_OPTIONS} | {
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
            **_mapping(where),
            "description": "the cells it is asked of: every key must agree; all when left out",
        },
        "at_most": {**number, "description": "passes when the whole interval is at or below"},
        "at_least": {**number, "description": "passes when the whole interval is at or above"},
        "equals": {
            "anyOf": [number, {**_mapping(equals), "required": ["value"]}],
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
                **_mapping(check),
                "required": ["metric"],
                "oneOf": [{"required": [predicate]} for predicate in predicates],
            },
        },
    }
    return {"$schema": DIALECT, "title": "kvbench gate", **_mapping(properties), "required": ["checks"]}


def _mapping(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _one_or_many(item: Schema) -> Schema:
    """A value or a list of them; the description and default stand outside, where editors look."""
    outside: Schema = {key: item[key] for key in ("description", "default") if key in item}
    inside = {key: value for key, value in item.items() if key not in outside}
    many: Schema = {"type": "array", "items": inside, "minItems": 1}
    return {"anyOf": [inside, many], **outside}


def _cell_key(key: str) -> Schema:
    option = CELL_OPTIONS[key]
    about = {"description": _described(key, option)}
    if key == "model":
        parts = {name: _option(name, CELL_OPTIONS[of]) for name, of in MODEL_KEYS.items()}
        return {"anyOf": [_plain(option), {**_mapping(parts), "required": ["source"]}], **about}
    if option.kind == "scale":
        number = {"type": "number", "exclusiveMinimum": 0}
        side: Schema = {"anyOf": [number, {"type": "array", "items": number, "minItems": 1}]}
        sides = {**_mapping({"k": side, "v": side}), "required": ["k", "v"]}
        file: Schema = {"type": "string", "pattern": r"\.json$"}
        return {"anyOf": [number, {"enum": list(WORDS)}, sides, file, {"type": "null"}], **about}
    return {**_plain(option), **about, "default": option.default}


def _option(key: str, option: Option) -> Schema:
    about: Schema = {"description": _described(key, option)}
    if option.default is not None or option.optional:
        about["default"] = option.default
    schema = {**_plain(option), **about}
    return _one_or_many(schema) if option.many else schema


def _plain(option: Option) -> Schema:
    """One value of the option: its type, and what it accepts."""
    schema: Schema = {"type": [_TYPES[option.kind], "null"] if option.optional else _TYPES[option.kind]}
    if option.choices:
        schema["enum"] = list(option.choices) + ([None] if option.optional else [])
    elif option.kind == "str":
        schema["pattern"] = r"\S"
    if option.minimum is not None:
        schema["minimum"] = option.minimum
    if option.maximum is not None:
        schema["maximum"] = option.maximum
    return schema


def _described(key: str, option: Option) -> str:
    meanings = _MEANINGS.get(key, {})
    if option.kind != "scale" and set(meanings) != set(option.choices):
        meanings = {}
    return ". ".join([option.help, *(f"{choice}: {meaning}" for choice, meaning in meanings.items())])


def _runner(runner: RunnerDecl) -> Schema:
    options = _mapping({key: _option(key, option) for key, option in runner.options.items()})
    return {**options, "type": ["object", "null"], "description": runner.help}


def _metric() -> Schema:
    table: Mapping[str, metrics.Metric] = getattr(metrics, "METRICS", {})
    known = "; ".join(f"{m.name} ({m.unit}): {m.definition}" for m in table.values())
    return {"type": "string", "enum": list(table), "description": known} if table else {"type": "string"}
