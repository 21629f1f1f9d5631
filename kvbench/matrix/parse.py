"""A matrix file: what it accepts, and its content before it is expanded into cells.

Every mistake goes to `Problems`; the result may only be used when there is none.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.matrix.document import DataPath, Document, Problems
from kvbench.matrix.keys import CELL_OPTIONS, MODEL_KEYS
from kvbench.matrix.rules import INVALID, Either, Items, Keys, Option, accepted, check
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.schema import Schema, document, schema_of

_MODEL_KEYS = {key: CELL_OPTIONS[of] for key, of in MODEL_KEYS.items()}
_MODEL = Either(
    (CELL_OPTIONS["model"], Keys("model", _MODEL_KEYS, required=("source",), example="{source: NAME}")),
    "the model: an alias, hub id, folder or .gguf file, or a mapping with source and more",
)
_CELL = {**CELL_OPTIONS, "model": _MODEL}
_NAME = Option(
    "str",
    None,
    "the run's name, made of a-z, 0-9, _ and -; by default the file's",
    pattern="^[a-z0-9_-]+$",
    expects="a name made of a-z, 0-9, _ and -, as in int8-batch",
)


def _entries(name: str, help: str) -> Items:
    entry = Keys(
        name, _CELL, least=1, list_hint="write one entry for each value", example="{kv_format: int8_sym}"
    )
    return Items(entry, help, optional=True, example="[{kv_format: int8_sym, batch: 8}]")


MATRIX = Keys(
    "a matrix",
    {
        "name": _NAME,
        "model": _MODEL,
        "axes": Keys(
            "axes",
            {key: Items(rule, rule.help, least=1, single=True) for key, rule in _CELL.items()},
            "the cell keys that vary, each with its values; a single value is a list of one",
            optional=True,
            example="{kv_format: [native, int8_sym]}",
        ),
        "engine": Keys(
            "engine",
            {key: rule for key, rule in CELL_OPTIONS.items() if key != "model"},
            "the cell keys that are the same for every cell",
            optional=True,
            example="{page_size: 16}",
            hints={"model": "model belongs at the top of the file, not under engine."},
            list_hint="move it to axes to vary it",
        ),
        "include": _entries("include", "cell keys added to the matching combinations, or cells of their own"),
        "exclude": _entries("exclude", "combinations left out: those that agree with every key of an entry"),
        "runners": Keys(
            "runners",
            {
                name: Keys(name, runner.options, runner.help, optional=True, example=f"{name}: {{}}")
                for name, runner in RUNNERS.items()
            },
            "what is measured on every cell, each runner with its options",
            least=1,
            example="{storage: {}}",
        ),
        "gate": Option("str", None, "the gate file, relative to this file", optional=True),
    },
    required=("runners",),
    any_of=("axes", "include"),
    example="{model: NAME, axes: {kv_format: [native, int8_sym]}, runners: {storage: {}}}",
    hints={
        key: f"{key} is a cell key; put it under axes to vary it, or under engine to fix it."
        for key in CELL_OPTIONS
    }
    | {name: f"{name} is a runner; put it under runners." for name in RUNNERS},
)


def matrix_schema() -> Schema:
    """The JSON Schema of `matrices/*.yaml`."""
    return document("kvbench matrix", schema_of(MATRIX))


@dataclass(frozen=True)
class Point:
    """Some cell keys with their values, and the place in the file that they come from."""

    values: Mapping[str, Any]
    path: DataPath


@dataclass(frozen=True)
class MatrixFile:
    """axes: axis -> its points (one of `model` may hold several keys). runners: each with every option."""

    name: str
    fixed: Mapping[str, Any]
    axes: Mapping[str, tuple[Point, ...]]
    include: tuple[Point, ...]
    exclude: tuple[Point, ...]
    runners: Mapping[str, Mapping[str, Any]]
    gate: str | None


def read(source: Document, problems: Problems) -> tuple[MatrixFile, bool]:
    """The content, and whether its cells may be expanded (False when one of their keys is refused)."""
    before = len(problems.faults)
    checked = check(MATRIX, source.data, problems)
    data: dict[str, Any] = {} if checked is INVALID else checked
    model = _cell_keys("model", data["model"]) if "model" in data else {}
    axes = {axis: tuple(_points(source, axis, values)) for axis, values in _part(data, "axes").items()}
    engine = _part(data, "engine")
    include, exclude = (tuple(_entry_points(data, section)) for section in ("include", "exclude"))
    _check_given_once(model, axes, engine, problems)
    known = list(
        dict.fromkeys([*axes, *(key for points in axes.values() for p in points for key in p.values)])
    )
    for path, key in [(entry.path, key) for entry in exclude for key in entry.values if key not in known]:
        sentence = f"exclude names {key}, which is not an axis; axes: {', '.join(known) or 'none'}."
        problems.add((*path, key), sentence, "unknown_key", key=True)
    sound = all(f.path[:1] in (("name",), ("runners",), ("gate",)) for f in problems.faults[before:])
    name = data["name"] if "name" in data else _name_of(Path(source.name).stem, problems)
    given = _part(data, "runners")
    runners = {
        runner: {k: _part(given, runner).get(k, o.default) for k, o in RUNNERS[runner].options.items()}
        for runner in given
    }
    gate = None if data.get("gate") is INVALID else data.get("gate")
    return MatrixFile(str(name), {**model, **engine}, axes, include, exclude, runners, gate), sound


def _part(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The mapping at `key`; {} where it is left out, null or refused."""
    part = data.get(key)
    return part if isinstance(part, dict) else {}


def _cell_keys(key: str, value: Any) -> dict[str, Any]:
    """The cell keys that `key: value` gives: one, or several for a model mapping; {} for a refused value."""
    if key == "model" and isinstance(value, dict):
        return {MODEL_KEYS[part]: v for part, v in value.items() if v is not INVALID}
    return {} if value is INVALID else {key: value}


def _points(source: Document, axis: str, values: Any) -> Iterator[Point]:
    many = isinstance(source.data["axes"][axis], list)
    for i, value in enumerate(values):
        yield Point(_cell_keys(axis, value), ("axes", axis, i) if many else ("axes", axis))


def _entry_points(data: Mapping[str, Any], section: str) -> Iterator[Point]:
    entries = data.get(section)
    for i, entry in enumerate(entries if isinstance(entries, list) else ()):
        parts = entry.items() if isinstance(entry, dict) else ()
        yield Point({k: v for key, value in parts for k, v in _cell_keys(key, value).items()}, (section, i))


def _name_of(stem: str, problems: Problems) -> str:
    """The file's name as the run's name, where it can be one."""
    try:
        return str(accepted(_NAME, stem, "name"))
    except UsageError as e:
        sentence = f"{str(e)[:-1]} (from the file's name); add name: to the matrix."
        problems.add(("name",), sentence, "not_accepted")
        return stem


def _check_given_once(
    model: Iterable[str], axes: Mapping[str, tuple[Point, ...]], engine: Iterable[str], problems: Problems
) -> None:
    """A cell key may be given once: by `model`, by one axis, or under `engine`."""
    given = dict.fromkeys(model, "model")
    places: list[tuple[str, str, DataPath]] = []
    for axis, points in axes.items():
        keys = dict.fromkeys(key for point in points for key in point.values)
        places += [(key, f"axes.{axis}", ("axes", axis)) for key in keys]
    places += [(key, "engine", ("engine", key)) for key in engine]
    for key, section, path in places:
        if given.setdefault(key, section) != section:
            sentence = f"{key} is given by {given[key]} and again by {section}; keep one."
            problems.add(path, sentence, "conflict", key=True)
