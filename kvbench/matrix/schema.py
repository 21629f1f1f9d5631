"""JSON Schemas (draft 2020-12) of matrix and gate files, made from the tables that the loaders check against.

For editors: they complete keys and show what is accepted while the file is written. The loaders stay the judges; they
also see what no schema says (a static format without a scale, a key that is both varied and fixed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS
from kvbench.formats.scales import WORDS
from kvbench.matrix.keys import CELL_OPTIONS, MODEL_KEYS
from kvbench.matrix.parse import SECTIONS
from kvbench.matrix.runners import RUNNERS, Option, RunnerDecl

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
    cell = {key: cell_key(key) for key in CELL_OPTIONS}
    axes = {key: _one_or_many(value) for key, value in cell.items()}
    sections: dict[str, Schema] = {
        "name": {"type": "string", "pattern": "^[a-z0-9_-]+$"},
        "model": cell["model"],
        "axes": {**mapping(axes), "type": ["object", "null"]},
        "engine": {**mapping({k: v for k, v in cell.items() if k != "model"}), "type": ["object", "null"]},
        "include": {"type": ["array", "null"], "items": {**mapping(cell), "minProperties": 1}},
        "exclude": {"type": ["array", "null"], "items": {**mapping(cell), "minProperties": 1}},
        "runners": {**mapping({name: _runner(r) for name, r in RUNNERS.items()}), "minProperties": 1},
        "gate": {"type": ["string", "null"], "pattern": r"\S"},
    }
    properties: dict[str, Schema] = {
        name: {**section, "description": SECTIONS[name]} for name, section in sections.items()
    }
    return {
        "$schema": DIALECT,
        "title": "kvbench matrix",
        **mapping(properties),
        "required": ["runners"],
        "anyOf": [{"required": ["axes"]}, {"required": ["include"]}],
    }


def mapping(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _one_or_many(item: Schema) -> Schema:
    """A value or a list of them; the description and default stand outside, where editors look."""
    outside: Schema = {key: item[key] for key in ("description", "default") if key in item}
    inside = {key: value for key, value in item.items() if key not in outside}
    many: Schema = {"type": "array", "items": inside, "minItems": 1}
    return {"anyOf": [inside, many], **outside}


def cell_key(key: str) -> Schema:
    option = CELL_OPTIONS[key]
    about = {"description": _described(key, option)}
    if key == "model":
        parts = {name: _option(name, CELL_OPTIONS[of]) for name, of in MODEL_KEYS.items()}
        return {"anyOf": [_plain(option), {**mapping(parts), "required": ["source"]}], **about}
    if option.kind == "scale":
        number = {"type": "number", "exclusiveMinimum": 0}
        side: Schema = {"anyOf": [number, {"type": "array", "items": number, "minItems": 1}]}
        sides = {**mapping({"k": side, "v": side}), "required": ["k", "v"]}
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
    options = mapping({key: _option(key, option) for key, option in runner.options.items()})
    return {**options, "type": ["object", "null"], "description": runner.help}
