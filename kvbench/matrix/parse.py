"""A matrix file, checked key by key: what it says, before it is expanded into cells.

Every complaint goes to `Problems`, so that a file with five mistakes is mended in one round; what was wrong is left
out of the outline, which is why it may only be used when no problem came up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.matrix.document import DataPath, Document, Problems, unknown_key
from kvbench.matrix.keys import CELL_OPTIONS, MODEL_KEYS
from kvbench.matrix.runners import RUNNERS, Option
from kvbench.matrix.values import canonical, complaint
from kvbench.text import show

SECTIONS: dict[str, str] = {
    "name": "the run's name, of a-z, 0-9, _ and -; by default the file's",
    "model": "the model: an alias, hub id, folder or .gguf file, or a mapping with source and more",
    "axes": "the cell keys that vary, each with its values; a single value is a list of one",
    "engine": "the cell keys that are fixed for every cell",
    "include": "cell keys added to the matching combinations, or cells of their own",
    "exclude": "combinations left out: those that agree with every key of an entry",
    "runners": "what is measured on every cell, each runner with its options",
    "gate": "the gate file, relative to this file",
}


@dataclass(frozen=True)
class Point:
    """Some cell keys with their values, and the place in the file that they come from."""

    values: Mapping[str, Any]
    path: DataPath


@dataclass(frozen=True)
class Outline:
    """`axes` maps the axis to its points (a point of `model` may hold several keys); `runners` has every option."""

    name: str
    fixed: Mapping[str, Any]
    axes: Mapping[str, tuple[Point, ...]]
    include: tuple[Point, ...]
    exclude: tuple[Point, ...]
    runners: Mapping[str, Mapping[str, Any]]
    gate: str | None


def read(document: Document, problems: Problems) -> tuple[Outline, bool]:
    """The outline, and whether its cells may be expanded (False when a problem of theirs came up)."""
    data = document.data
    if not isinstance(data, dict):
        problems.add((), f"a matrix is a mapping with the keys {', '.join(SECTIONS)}.")
        data = {}
    before = len(problems)
    for key in data:
        if key not in SECTIONS:
            problems.add((key,), _unknown_section(key), key=True)
    model = _model(data["model"], ("model",), problems) if "model" in data else {}
    axes = _axes(data.get("axes"), problems)
    engine = _engine(data.get("engine"), problems)
    include = _entries(data.get("include"), "include", problems)
    exclude = _entries(data.get("exclude"), "exclude", problems)
    _conflicts(model, axes, engine, problems)
    _excludable(exclude, axes, problems)
    sound = len(problems) == before
    name = _name(data, Path(document.name).stem, problems)
    runners = _runners(data.get("runners"), problems)
    gate = data.get("gate")
    if wrong := complaint(Option("str", None, "", optional=True), gate):
        problems.add(("gate",), f"gate {wrong}")
        gate = None
    return Outline(name, {**model, **engine}, axes, include, exclude, runners, gate), sound


def _unknown_section(key: str) -> str:
    if key in CELL_OPTIONS:
        return f"{key} is a cell key; put it under axes (to vary it) or under engine (to fix it)."
    if key in RUNNERS:
        return f"{key} is a runner; put it under runners."
    return unknown_key(key, "a matrix", list(SECTIONS))


def _name(data: Mapping[str, Any], stem: str, problems: Problems) -> str:
    name = data.get("name", stem)
    if wrong := complaint(Option("str", None, ""), name):
        problems.add(("name",), f"name {wrong}")
    elif not re.fullmatch(r"[a-z0-9_-]+", name):
        source = "" if "name" in data else " (from the file's name)"
        problems.add(
            ("name",), f"name is {show(name)}{source}; a name is made of a-z, 0-9, _ and -, as in int8-batch."
        )
    return str(name)


def _mapping(value: Any, path: DataPath, problems: Problems, example: str) -> dict[str, Any]:
    """The mapping at `path`; {} for null, and for anything else after a complaint."""
    if isinstance(value, dict):
        return value
    if value is not None:
        problems.add(path, f"{path[-1]} is {show(value)} where a mapping is due, as in {example}.")
    return {}


def _values(key: str, value: Any, path: DataPath, problems: Problems) -> dict[str, Any]:
    """The cell keys that `key: value` gives: one, or several for a model mapping; {} after a complaint."""
    if key == "model":
        return _model(value, path, problems)
    option = CELL_OPTIONS[key]
    if wrong := complaint(option, value):
        problems.add(path, f"{key} {wrong}")
        return {}
    return {key: canonical(option, value)}


def _model(value: Any, path: DataPath, problems: Problems) -> dict[str, Any]:
    if not isinstance(value, dict):
        if wrong := complaint(CELL_OPTIONS["model"], value):
            problems.add(path, f"model {wrong}")
        return {"model": value}
    values: dict[str, Any] = {}
    if "source" not in value:
        problems.add(path, "model has no source; name the alias, hub id, folder or .gguf file.")
    for key, part in value.items():
        if key not in MODEL_KEYS:
            problems.add((*path, key), unknown_key(key, "model", list(MODEL_KEYS)), key=True)
        elif wrong := complaint(CELL_OPTIONS[MODEL_KEYS[key]], part):
            problems.add((*path, key), f"{key} {wrong}")
        else:
            values[MODEL_KEYS[key]] = part
    return values


def _axes(data: Any, problems: Problems) -> dict[str, tuple[Point, ...]]:
    axes: dict[str, tuple[Point, ...]] = {}
    for key, value in _mapping(data, ("axes",), problems, "{kv_format: [native, int8_sym]}").items():
        path: DataPath = ("axes", key)
        if key not in CELL_OPTIONS:
            problems.add(path, unknown_key(key, "axes", list(CELL_OPTIONS)), key=True)
            continue
        items = (
            [((*path, i), item) for i, item in enumerate(value)]
            if isinstance(value, list)
            else [(path, value)]
        )
        if not items:
            problems.add(path, f"{key} has no value; an axis takes at least one.")
        axes[key] = tuple(Point(_values(key, item, place, problems), place) for place, item in items)
    return axes


def _engine(data: Any, problems: Problems) -> dict[str, Any]:
    engine: dict[str, Any] = {}
    accepted = [key for key in CELL_OPTIONS if key != "model"]
    for key, value in _mapping(data, ("engine",), problems, "{page_size: 16}").items():
        if key == "model":
            problems.add(("engine", key), "model goes to the top of the file, not under engine.", key=True)
        elif key not in CELL_OPTIONS:
            problems.add(("engine", key), unknown_key(key, "engine", accepted), key=True)
        else:
            engine.update(_values(key, value, ("engine", key), problems))
    return engine


def _entries(data: Any, section: str, problems: Problems) -> tuple[Point, ...]:
    if data is None:
        return ()
    if not isinstance(data, list):
        problems.add(
            (section,), f"{section} takes a list of mappings, as in [{{kv_format: int8_sym, batch: 8}}]."
        )
        return ()
    points = []
    for i, entry in enumerate(data):
        path: DataPath = (section, i)
        if not isinstance(entry, dict) or not entry:
            problems.add(path, f"an entry of {section} is a mapping of cell keys, not {show(entry)}.")
            continue
        values: dict[str, Any] = {}
        for key, value in entry.items():
            if key not in CELL_OPTIONS:
                problems.add((*path, key), unknown_key(key, section, list(CELL_OPTIONS)), key=True)
            elif isinstance(value, list):
                problems.add(
                    (*path, key),
                    f"{key} is a list in {section}, which takes one value; write an entry for each.",
                )
            else:
                values.update(_values(key, value, (*path, key), problems))
        points.append(Point(values, path))
    return tuple(points)


def _conflicts(
    model: Mapping[str, Any],
    axes: Mapping[str, tuple[Point, ...]],
    engine: Mapping[str, Any],
    problems: Problems,
) -> None:
    """A cell key may be given once: by `model`, by one axis, or under `engine`."""
    given: dict[str, tuple[str, DataPath]] = dict.fromkeys(model, ("model", ("model",)))
    places: list[tuple[str, str, DataPath]] = []
    for axis, points in axes.items():
        keys = dict.fromkeys(key for point in points for key in point.values)
        places += [(key, f"axes.{axis}", ("axes", axis)) for key in keys]
    places += [(key, "engine", ("engine", key)) for key in engine]
    for key, section, path in places:
        if key in given and given[key][0] != section:
            problems.add(
                path, f"{key} is given by {given[key][0]} and again by {section}; keep one.", key=True
            )
        given.setdefault(key, (section, path))


def _excludable(
    exclude: tuple[Point, ...], axes: Mapping[str, tuple[Point, ...]], problems: Problems
) -> None:
    known = dict.fromkeys(
        [*axes, *(key for points in axes.values() for point in points for key in point.values)]
    )
    for entry in exclude:
        for key in entry.values:
            if key not in known:
                accepted = ", ".join(known) or "none"
                problems.add(
                    (*entry.path, key), f"exclude names {key}, which is no axis; axes: {accepted}.", key=True
                )


def _runners(data: Any, problems: Problems) -> dict[str, dict[str, Any]]:
    runners: dict[str, dict[str, Any]] = {}
    if isinstance(data, list):
        problems.add(("runners",), "runners is a list where a mapping is due; write each as `storage: {}`.")
        return runners
    for name, options in _mapping(data, ("runners",), problems, "{storage: {}}").items():
        path: DataPath = ("runners", name)
        if name not in RUNNERS:
            problems.add(path, unknown_key(name, "runners", list(RUNNERS)), key=True)
            continue
        runners[name] = _options(name, _mapping(options, path, problems, f"{name}: {{}}"), path, problems)
    if not data:
        problems.add(
            ("runners",), f"the matrix names no runner; name one or more under runners: {', '.join(RUNNERS)}."
        )
    return runners


def _options(runner: str, given: Mapping[str, Any], path: DataPath, problems: Problems) -> dict[str, Any]:
    """Every option of the runner, in the order of its declaration; a scalar of a list option becomes [scalar]."""
    declared = RUNNERS[runner].options
    for key in given:
        if key not in declared:
            sentence = (
                unknown_key(key, runner, list(declared))
                if declared
                else f"{runner} takes no option, so no {key}."
            )
            problems.add((*path, key), sentence, key=True)
    return {
        key: _option(key, option, given[key], (*path, key), problems) if key in given else option.default
        for key, option in declared.items()
    }


def _option(key: str, option: Option, value: Any, path: DataPath, problems: Problems) -> Any:
    if not option.many:
        if wrong := complaint(option, value):
            problems.add(path, f"{key} {wrong}")
            return option.default
        return canonical(option, value)
    items = (
        [((*path, i), item) for i, item in enumerate(value)] if isinstance(value, list) else [(path, value)]
    )
    if not items:
        problems.add(path, f"{key} has no value; it takes at least one.")
    wrongs = [(place, wrong) for place, item in items if (wrong := complaint(option, item))]
    for place, wrong in wrongs:
        problems.add(place, f"{key} {wrong}")
    return [] if wrongs else [canonical(option, item) for _, item in items]
