"""Whether a value from YAML is what an `Option` accepts, said in a sentence, and its canonical form."""

from __future__ import annotations

import math
from typing import Any

from kvbench.formats.kv import LARGEST, SMALLEST
from kvbench.formats.scales import WORDS, short
from kvbench.matrix.runners import Option
from kvbench.matrix.yaml import scalar
from kvbench.text import show, suggestion

_DUE = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


def complaint(option: Option, value: Any) -> str | None:
    """What is wrong with one value, to be read after its name, or None: `is the text "8" where ... is due`.

    Nothing is cast: `"8"` is no number, `8` no name, `true` neither; a NaN or an infinity is never accepted.
    """
    if value is None and option.optional:
        return None
    if option.kind == "scale":
        return _scale_complaint(value)
    due = _due(option)
    if not _is_kind(option.kind, value):
        return f"is {_described(value)} where {due} is due{_mend(option.kind, value)}."
    if isinstance(value, str) and not value.strip():
        return f"is an empty text where {due} is due."
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {show(value)} where a finite number is due."
    if option.choices and value not in option.choices:
        return f"is {show(value)}, which is not accepted; {due} is due.{suggestion(value, map(str, option.choices))}"
    if option.minimum is not None and value < option.minimum:
        return f"is {show(value)}; the smallest accepted is {show(option.minimum)}."
    if option.maximum is not None and value > option.maximum:
        return f"is {show(value)}; the largest accepted is {show(option.maximum)}."
    return None


def canonical(option: Option, value: Any) -> Any:
    """The value as it is hashed: numbers of float options and scales as floats, files by name. Takes accepted values only."""
    if value is None:
        return None
    if option.kind == "float":
        return float(value)
    if option.kind == "scale" and not isinstance(value, str):
        return (
            {side: _floats(value[side]) for side in ("k", "v")} if isinstance(value, dict) else float(value)
        )
    return value


def text(value: Any) -> str:
    """A cell value as names and `-k` write it: int8_sym, 4, true, null, 0.05; scales by side or layer as `scales.short` does."""
    if isinstance(value, dict):
        return short(value)
    return value if isinstance(value, str) else show(value)


def _due(option: Option) -> str:
    if option.choices:
        return f"one of {', '.join(map(str, option.choices))}"
    if option.kind == "int" and option.minimum is not None:
        return f"a whole number of at least {show(option.minimum)}"
    return _DUE[option.kind]


def _is_kind(kind: str, value: Any) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return kind == "bool" and isinstance(value, bool)
    return isinstance(value, {"int": (int,), "float": (int, float), "str": (str,)}[kind])


def _described(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {show(value)}"
    if isinstance(value, str):
        return f"the text {show(value)}"
    if isinstance(value, int | float):
        return f"the number {show(value)}"
    return f"a list {show(value)}" if isinstance(value, list) else f"a mapping {show(value)}"


def _mend(kind: str, value: Any) -> str:
    """The next step, where the mistake shows it."""
    if isinstance(value, str) and kind != "str":
        try:
            meant = scalar(value.replace("_", ""))
        except ValueError:
            return ""
        if not _is_kind(kind, meant):
            return ""
        return f"; write {show(meant)}" if "_" in value else f"; write {show(meant)} without quotes"
    if kind == "str" and isinstance(value, int | float) and not isinstance(value, bool):
        return "; put it in quotes if it is a name"
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


def _scale_complaint(value: Any) -> str | None:
    due = f"a number above 0, {', '.join(WORDS)}, a .json file of scales, or {{k: ..., v: ...}} with a number or a list of one a layer each"
    if isinstance(value, str) and (value in WORDS or value.endswith(".json")):
        return None
    if isinstance(value, dict):
        if set(value) != {"k", "v"}:
            return f"has the keys {', '.join(value) or '(none)'} where k and v are due."
        layers = [len(part) for part in value.values() if isinstance(part, list)]
        if 0 in layers or len(set(layers)) > 1:
            return f"lists {' and '.join(map(str, layers))} layers; k and v take one number a layer."
        parts = [x for part in value.values() for x in (part if isinstance(part, list) else [part])]
    else:
        parts = [value]
    for part in parts:
        if not _is_kind("float", part):
            near = suggestion(part, WORDS) if isinstance(part, str) and part is value else ""
            return f"holds {_described(part)} where {due} is due{_mend('float', part)}.{near}"
        if not (math.isfinite(part) and part > 0):
            return f"holds {show(part)}; a scale is a finite number above 0."
        if not SMALLEST <= part <= LARGEST:
            return f"holds {show(part)}; a scale is kept in float32, from {SMALLEST:.3g} to {LARGEST:.3g}."
    return None


def _floats(value: Any) -> Any:
    return [float(x) for x in value] if isinstance(value, list) else float(value)
