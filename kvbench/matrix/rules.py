"""What a configuration file accepts, as declarations, and the one checker that walks them.

Matrix and gate files are declared with four kinds of rule: `Option` (one value), `Keys` (a mapping), `Items`
(a list) and `Either`. `kvbench.matrix.schema` makes the JSON Schema from them. What no schema can express (a
static format without a scale) is checked by the code that uses the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.errors import UsageError
from kvbench.matrix.document import DataPath, Document, Problems
from kvbench.text import show, suggestion

INVALID = object()  # takes the place of a value that was refused
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


@dataclass(frozen=True)
class Option:
    """One value. kind: a key of `KINDS`. choices: the accepted values, () for any. optional: takes null.

    many: a list of such values; a single value stands for a list of one. fans_out: each value of the list
    becomes a task. names_data: the value names evaluation data, whose digest is part of the task's key.
    looks: sample sizes that `--until-decided` judges first; the matrix's value comes last. Such an option
    accepts null for the whole set, and any other value makes the result partial. pattern: what a text without
    choices must contain. expects: what is accepted, in words. meanings: choice -> what it means. hints: wrong
    value -> what to do instead."""

    kind: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    optional: bool = False
    many: bool = False
    fans_out: bool = False
    names_data: bool = False
    maximum: float | None = None
    looks: tuple[int, ...] = ()
    pattern: str = r"\S"
    expects: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """A mapping. name: what messages call it. any_of: at least one of these keys; one_of: exactly one.

    hints: key that belongs elsewhere -> what to do with it. list_hint: what to do where a list was given for
    one value. ordered: the result has the order of the declaration. also: what is wrong with a mapping whose
    parts are accepted, or ""."""

    name: str
    keys: Mapping[str, Rule]
    help: str = ""
    required: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    least: int = 0
    optional: bool = False
    example: str = ""
    hints: Mapping[str, str] = field(default_factory=dict)
    list_hint: str = ""
    ordered: bool = False
    also: Callable[[Mapping[str, Any]], str] = lambda value: ""


@dataclass(frozen=True)
class Items:
    """A list of `least` to `most` items. single: a value alone stands for a list of one."""

    item: Rule
    help: str = ""
    least: int = 0
    most: int | None = None
    optional: bool = False
    single: bool = False
    example: str = ""


@dataclass(frozen=True)
class Either:
    """A value that one of the rules accepts."""

    rules: tuple[Rule, ...]
    help: str = ""
    default: Any = None
    optional: bool = False
    kind: str = "any"


Rule = Option | Keys | Items | Either


def check(rule: Rule, value: Any, problems: Problems, path: DataPath = (), list_hint: str = "") -> Any:
    """The value as it is hashed, with INVALID for each refused part; every mistake goes to `problems`.

    Nothing is cast: `"8"` is no number, `8` no text, NaN and infinities are refused. Numbers of float options
    become floats, a single value of a list becomes a list."""
    if value is None and rule.optional:
        return None
    match rule:
        case Option(many=True):
            return check(Items(replace(rule, many=False), least=1, single=True), value, problems, path)
        case Option():
            if code := _fault(rule, value):
                return _refuse(rule, value, problems, path, code, list_hint)
            return float(value) if rule.kind == "float" else value
        case Keys():
            return _check_keys(rule, value, problems, path)
        case Items():
            return _check_items(rule, value, problems, path)
        case Either():
            return _check_either(rule, value, problems, path, list_hint)


def accepted(rule: Rule, value: Any, name: str) -> Any:
    """The value of `name` as it is hashed. Raises UsageError with every mistake in it."""
    problems = Problems(Document("", value, "", {}, {}))
    result = check(rule, value, problems, (name,))
    if problems.faults:
        raise UsageError(" ".join(fault.sentence for fault in problems.faults))
    return result


def expected(rule: Rule) -> str:
    """What the rule accepts, in words: `a whole number of at least 1`, `torch, triton or auto`."""
    match rule:
        case Option():
            words = rule.expects or _expected_value(rule)
        case Keys():
            words = f"a mapping{f', as in {rule.example}' if rule.example else ''}"
        case Items():
            size = f" of {rule.most}" if rule.most is not None and rule.most == rule.least else ""
            words = f"a list{size}{f', as in {rule.example}' if rule.example else ''}"
        case Either():
            words = _alternatives(word for sub in rule.rules for word in _words(sub))
    return f"{words} or null" if rule.optional and isinstance(rule, Option) else words


def _words(rule: Rule) -> list[str]:
    return list(map(str, rule.choices)) if isinstance(rule, Option) and rule.choices else [expected(rule)]


def unknown_key(key: str, section: str, keys: Mapping[str, Any]) -> str:
    """The sentence for a key that `section` does not have."""
    if not keys:
        return f"unknown key {key} in {section}, which takes no keys."
    return f"unknown key {key} in {section}; accepted: {', '.join(keys)}.{suggestion(key, keys)}"


def _check_keys(rule: Keys, value: Any, problems: Problems, path: DataPath) -> Any:
    if not isinstance(value, dict):
        return _refuse(rule, value, problems, path, "wrong_type", "")
    if len(value) < rule.least:
        what = _alternatives(rule.keys) if len(rule.keys) <= 12 else expected(rule)
        problems.add(path, f"{rule.name}: expected {what}, got no keys.", "empty")
    for key in value:
        if key not in rule.keys:
            sentence = rule.hints.get(key) or unknown_key(key, rule.name, rule.keys)
            problems.add((*path, key), sentence, "unknown_key", key=True)
    for key in rule.required:
        if key not in value:
            help = f": {rule.keys[key].help}" if rule.keys[key].help else ""
            problems.add((*path, key), f"{rule.name} needs the key {key}{help}.", "missing_key")
    for keys, most in ((rule.any_of, len(rule.any_of)), (rule.one_of, 1)):
        given = [key for key in keys if key in value]
        if keys and not 1 <= len(given) <= most:
            number = "exactly one" if most == 1 else "at least one"
            found = " and ".join(given) or "none"
            sentence = f"{rule.name} needs {number} of {', '.join(keys)}, as in {rule.example}; got {found}."
            problems.add(path, sentence, "missing_key" if not given else "conflict")
    before = len(problems.faults)
    parts = {
        key: check(rule.keys[key], part, problems, (*path, key), rule.list_hint)
        for key, part in value.items()
        if key in rule.keys
    }
    if rule.ordered:
        parts = {key: parts[key] for key in rule.keys if key in parts}
    if len(problems.faults) == before and (sentence := rule.also(parts)):
        problems.add(path, sentence, "conflict")
    return parts


def _check_items(rule: Items, value: Any, problems: Problems, path: DataPath) -> Any:
    if not isinstance(value, list):
        if rule.single:
            return [check(rule.item, value, problems, path)]
        return _refuse(rule, value, problems, path, "wrong_type", "")
    if len(value) < rule.least or (rule.most is not None and len(value) > rule.most):
        size = f"{rule.least} values" if rule.least == rule.most else f"at least {rule.least} value"
        problems.add(path, f"{_name(path)}: expected {size}, got {len(value)}.", "wrong_length")
    return [check(rule.item, item, problems, (*path, i)) for i, item in enumerate(value)]


def _check_either(rule: Either, value: Any, problems: Problems, path: DataPath, list_hint: str) -> Any:
    """By the rule that accepts the value's type; a text may have several."""
    fitting = [sub for sub in rule.rules if _is_of_type(sub, value)]
    for sub in fitting:
        if isinstance(sub, Keys | Items) or not _fault(sub, value):
            return check(sub, value, problems, path)
    if fitting and not isinstance(value, str):
        return _refuse(fitting[0], value, problems, path, _fault(fitting[0], value), list_hint)
    return _refuse(rule, value, problems, path, "not_accepted" if fitting else "wrong_type", list_hint)


def _refuse(rule: Rule, value: Any, problems: Problems, path: DataPath, code: str, list_hint: str) -> Any:
    name = _name(path) or (rule.name if isinstance(rule, Keys) else "")
    hint = _hint(list(_options(rule)), value, list_hint)
    choices = [str(choice) for option in _options(rule) for choice in option.choices]
    near = suggestion(value, choices) if isinstance(value, str) and not hint else ""
    words = "a finite number" if code == "not_finite" else expected(rule)
    step = f"; {hint}" if hint else ""
    problems.add(path, f"{name}: expected {words}, got {show(value)}{step}.{near}", code)
    return INVALID


def _fault(option: Rule, value: Any) -> str:
    """Why the option does not accept the value, as a code, or ""."""
    if not isinstance(option, Option) or not _is_of_type(option, value):
        return "wrong_type"
    if isinstance(value, int | float) and not _is_finite(value, option.kind):
        return "not_finite"
    if option.choices:
        return "" if value in option.choices else "not_accepted"
    if isinstance(value, str):
        return "" if re.search(option.pattern, value) else "not_accepted"
    if option.minimum is not None and value < option.minimum:
        return "too_small"
    return "too_large" if option.maximum is not None and value > option.maximum else ""


def _is_of_type(rule: Rule, value: Any) -> bool:
    match rule:
        case Option(kind="bool"):
            return isinstance(value, bool)
        case Option():
            types = {"int": int, "float": int | float, "str": str}
            return isinstance(value, types[rule.kind]) and not isinstance(value, bool)
        case Keys():
            return isinstance(value, dict)
        case Items():
            return isinstance(value, list)
        case Either():
            return any(_is_of_type(sub, value) for sub in rule.rules)


def _is_finite(value: float, kind: str) -> bool:
    try:
        return (kind == "int" and isinstance(value, int)) or math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _expected_value(option: Option) -> str:
    if option.choices:
        return _alternatives(map(str, option.choices))
    low, high, kind = option.minimum, option.maximum, KINDS[option.kind]
    if low is not None and high is not None:
        return f"{kind} from {low:.3g} to {high:.3g}"
    return kind + (f" of at least {low:g}" if low is not None else "")


def _alternatives(words: Iterable[str]) -> str:
    """`a, b or c`"""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _hint(options: list[Option], value: Any, list_hint: str) -> str:
    """The next step, where the mistake shows it, or ""."""
    kinds = {option.kind for option in options}
    if isinstance(value, list):
        return list_hint
    if isinstance(value, str):
        known = [option.hints[value] for option in options if value in option.hints]
        return known[0] if known else _number_hint(kinds, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if kinds == {"int"} and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    names = kinds == {"str"} and not any(option.choices for option in options)
    return "put it in quotes if it is a name" if names else ""


def _number_hint(kinds: set[str], value: str) -> str:
    """For a text that would be accepted without its quotes or underscores."""
    from kvbench.matrix.yaml import scalar  # only a mistake needs it

    try:
        meant = scalar(value.replace("_", ""))
    except ValueError:
        return ""
    if not any(_is_of_type(Option(kind, None, ""), meant) for kind in kinds - {"str"}):
        return ""
    return f"write {show(meant)}" if "_" in value else f"write {show(meant)} without quotes"


def _options(rule: Rule) -> Iterator[Option]:
    if isinstance(rule, Option):
        yield rule
    elif isinstance(rule, Either):
        for sub in rule.rules:
            yield from _options(sub)


def _name(path: DataPath) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "")
