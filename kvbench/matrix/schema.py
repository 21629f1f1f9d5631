"""JSON Schemas (draft 2020-12) made from the declarations that the loaders check against.

For editors, which complete keys and show what is accepted. The loaders check more than a schema can express.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.matrix.rules import Either, Items, Keys, Option, Rule

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}


def document(title: str, schema: Mapping[str, Any]) -> Schema:
    """A schema with its dialect and title."""
    return {"$schema": DIALECT, "title": title, **schema}


def mapping(properties: Mapping[str, Schema]) -> Schema:
    """An object with these properties and no others."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def schema_of(rule: Rule) -> Schema:
    """What the rule accepts, with its description and default."""
    match rule:
        case Option(many=True):
            schema = _one_or_many(replace(rule, many=False, help=""), 1)
        case Option():
            schema = _value(rule)
        case Keys():
            schema = mapping({key: schema_of(sub) for key, sub in rule.keys.items()})
            schema |= {"required": list(rule.required)} if rule.required else {}
            schema |= {"minProperties": rule.least} if rule.least else {}
            for word, keys in (("anyOf", rule.any_of), ("oneOf", rule.one_of)):
                schema |= {word: [{"required": [key]} for key in keys]} if keys else {}
        case Items(single=True):
            schema = _one_or_many(rule.item, rule.least)
        case Items():
            schema = _list_of(rule.item, rule.least)
            schema |= {"maxItems": rule.most} if rule.most is not None else {}
        case Either():
            schema = {"anyOf": [_without_notes(schema_of(sub)) for sub in rule.rules]}
    if rule.optional and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    elif rule.optional:
        schema["anyOf"].append({"type": "null"})
    if rule.help:
        meanings = rule.meanings.items() if isinstance(rule, Option) else ()
        schema["description"] = ". ".join([rule.help, *(f"{word}: {text}" for word, text in meanings)])
    if isinstance(rule, Option | Either) and (rule.default is not None or rule.optional):
        schema["default"] = rule.default
    return schema


def _value(option: Option) -> Schema:
    schema: Schema = {"type": _TYPES[option.kind]}
    if option.choices:
        schema["enum"] = [*option.choices, *([None] if option.optional else [])]
    elif option.kind == "str" and option.pattern:
        schema["pattern"] = option.pattern
    if option.minimum is not None:
        schema["minimum"] = option.minimum
    if option.maximum is not None:
        schema["maximum"] = option.maximum
    return schema


def _one_or_many(item: Rule, least: int) -> Schema:
    """A value or a list of them; description and default are outside, where editors look for them."""
    whole = schema_of(item)
    inside = _without_notes(whole)
    outside: Schema = {key: whole[key] for key in ("description", "default") if key in whole}
    return {"anyOf": [inside, _list_of(item, least)], **outside}


def _list_of(item: Rule, least: int) -> Schema:
    schema = {"type": "array", "items": _without_notes(schema_of(item))}
    return schema | ({"minItems": least} if least else {})


def _without_notes(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in ("description", "default")}
