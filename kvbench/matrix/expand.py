"""An outline becomes cells: combinations as GitHub Actions makes them, frozen, with a native baseline for each.

1. The cross product of the axes, in the order of the file; none when there are no axes.
2. `exclude` drops the combinations that agree with every key of an entry.
3. Each `include` entry is added to every combination of step 1 that it fits, that is, whose axis values it would not
   change; values that an earlier entry added may be changed. An entry that fits none becomes a cell of its own, made
   of its own keys and the fixed ones, and later entries do not add to it.
4. What is still open is filled from the fixed keys (`model`, `engine`) and the defaults, `auto` is resolved, and equal
   cells are merged.
5. Every cell gets its baseline: the same cell with native KV and weights, added where the matrix has it not. Cells with
   native weights run on `native_model` where one is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import content_hash
from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import WORDS, of_file
from kvbench.machine.host import Host
from kvbench.matrix.cells import CELL_KEYS, MODEL_NAMES, Cell, one_model
from kvbench.matrix.document import DataPath, Problems
from kvbench.matrix.keys import MODEL_KEYS
from kvbench.matrix.parse import Outline, Point
from kvbench.matrix.values import text

BASELINE: dict[str, Any] = {"weights": "native", "gemm": "auto", "kv_format": "native", "scale": None}
_AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass
class _Combination:
    """axis: the values of the axes; added: those of include entries, with the entry's place in `added_at`."""

    axis: dict[str, Any]
    path: DataPath
    added: dict[str, Any] = field(default_factory=dict)
    added_at: dict[str, DataPath] = field(default_factory=dict)

    def fits(self, entry: Point) -> bool:
        return all(self.axis[key] == value for key, value in entry.values.items() if key in self.axis)

    def add(self, entry: Point) -> None:
        new = {key: value for key, value in entry.values.items() if key not in self.axis}
        self.added.update(new)
        self.added_at.update(dict.fromkeys(new, entry.path))


def expand(
    outline: Outline,
    host: Host,
    problems: Problems,
    line_of: Callable[[DataPath], int | None],
    read_scale: Callable[[str], dict[str, Any]],
) -> tuple[Cell, ...]:
    """The cells, baselines first, then in matrix order; () after a complaint. read_scale: what a file of scales holds."""
    before = len(problems)
    combinations = _combinations(outline)
    if not combinations:
        problems.add(*_nothing(outline))
    if any("model" not in {**outline.fixed, **c.axis, **c.added} for c in combinations):
        problems.add((), "no model is named; write it at the top, as in model: smollm2-135m-instruct.")
    specs: dict[str, tuple[dict[str, Any], DataPath]] = {}
    used_scale = False
    for combination in combinations:
        spec = {**CELL_KEYS, **outline.fixed, **combination.axis, **combination.added}
        if KV_FORMATS[spec["kv_format"]].scale_kind == "static":
            used_scale = used_scale or "scale" in combination.axis
        _settle_scale(spec, combination, outline, problems)
        if isinstance(spec["scale"], str) and spec["scale"] not in WORDS:
            _read_scale(spec, outline, problems, read_scale)
        _settle_gemm(spec, combination, problems)
        spec = _on_native_model(resolve_auto(spec, host))
        specs.setdefault(content_hash(spec), (spec, combination.path))
    if "scale" in outline.axes and not used_scale and combinations:
        problems.add(
            ("axes", "scale"), "scale is an axis, but no static format reads it; add one, or remove the axis."
        )
    if len(problems) > before:
        return ()
    return _cells(outline, specs, line_of)


def _combinations(outline: Outline) -> list[_Combination]:
    products = itertools.product(*outline.axes.values()) if outline.axes else ()
    originals = [
        _Combination(_merged(points), _place(outline, points))
        for points in products
        if not any(_agrees(_merged(points), entry.values) for entry in outline.exclude)
    ]
    alone = []
    for entry in outline.include:
        fitting = [c for c in originals if c.fits(entry)]
        for combination in fitting:
            combination.add(entry)
        if not fitting:
            alone.append(
                _Combination({}, entry.path, dict(entry.values), dict.fromkeys(entry.values, entry.path))
            )
    return originals + alone


def _agrees(values: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(key in values and values[key] == value for key, value in entry.items())


def _merged(points: Iterable[Point]) -> dict[str, Any]:
    return {key: value for point in points for key, value in point.values.items()}


def _place(outline: Outline, points: tuple[Point, ...]) -> DataPath:
    """A combination is shown at its format in the file, or at the axes when the format is fixed."""
    return next(
        (p.path for axis, p in zip(outline.axes, points, strict=True) if axis == "kv_format"), ("axes",)
    )


def _nothing(outline: Outline) -> tuple[DataPath, str]:
    if outline.axes:
        return ("exclude",), "exclude leaves no cell; remove an entry, or add cells under include."
    if engine := [key for key in outline.fixed if key not in MODEL_KEYS.values()]:
        return (
            ("engine",),
            "engine fixes keys of the cells that axes and include make, and the matrix has neither, so it has no cell; move a "
            f"key to axes, as in axes: {{{engine[0]}: [{text(outline.fixed[engine[0]])}]}}.",
        )
    return (
        (),
        "the matrix is empty: it has no axes and no include; write axes: {kv_format: [native, int8_sym]}.",
    )


def _settle_scale(
    spec: dict[str, Any], combination: _Combination, outline: Outline, problems: Problems
) -> None:
    """Static formats need a scale; for the others an axis of scales means nothing, and a named scale is a mistake."""
    name = spec["kv_format"]
    static = [f.name for f in KV_FORMATS.values() if f.scale_kind == "static"]
    if name in static:
        if spec["scale"] is None:
            path = combination.added_at.get("kv_format", combination.path)
            where = ("engine", "kv_format") if "kv_format" in outline.fixed and path == ("axes",) else path
            problems.add(
                where,
                f"{name} needs a scale; add one, as in scale: 0.05, scale: {{k: 0.05, v: 0.1}} or scale: checkpoint.",
            )
    elif spec["scale"] is not None:
        if combination.added.get("scale") is not None:
            problems.add(
                combination.added_at["scale"],
                f"the scale is given to a cell with {name}, which takes none; name a static format beside it "
                f"({', '.join(static)}).",
            )
        elif "scale" not in combination.axis:
            problems.add(
                ("engine", "scale"),
                f"scale is fixed for every cell, but {name} takes none; move it to axes, where it reaches only the "
                f"static formats ({', '.join(static)}).",
            )
        spec["scale"] = None


def _read_scale(
    spec: dict[str, Any], outline: Outline, problems: Problems, read_scale: Callable[[str], dict[str, Any]]
) -> None:
    """The content of a file of scales in its name's place, where the file is for the cell's format."""
    name = spec["scale"]
    points = [*(p for axis in outline.axes.values() for p in axis), *outline.include]
    path = next((p.path for p in points if p.values.get("scale") == name), ("engine", "scale"))
    try:
        spec["scale"] = read_scale(name)
    except UsageError as e:
        problems.add(path, str(e))
        return
    facts = of_file(spec["scale"]) or {}
    if (made_for := facts.get("format")) != spec["kv_format"]:
        problems.add(
            path,
            f"the scale file {name} is for {made_for}, and a cell with {spec['kv_format']} names it; leave that combination out "
            f"with exclude, or calibrate for it: kvbench calibrate MODEL OUT.json --format {spec['kv_format']}.",
        )


def _settle_gemm(spec: dict[str, Any], combination: _Combination, problems: Problems) -> None:
    """Native weights have one path: an axis of paths does not reach them, and a named path is a mistake."""
    if spec["weights"] != "native" or spec["gemm"] == "auto":
        return
    if "gemm" not in combination.axis:
        problems.add(
            combination.added_at.get("gemm", ("engine", "gemm")),
            f"gemm: {spec['gemm']} is given to a cell with native weights, which have no FP8 product; move it to axes, "
            "where it reaches only FP8 weights, or ask for weights: fp8_block128.",
        )
    spec["gemm"] = "auto"


def baseline_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a cell's native baseline; of a task's, which are some of a cell's, those."""
    native = _on_native_model({**spec, **BASELINE})
    return {key: native[key] for key in spec}


def _on_native_model(spec: dict[str, Any]) -> dict[str, Any]:
    """Cells with native weights run on the unquantized model, where one is named."""
    if spec["weights"] != "native" or spec["native_model"] is None:
        return spec
    return {**spec, "model": spec["native_model"], "model_revision": None, "native_model": None}


def resolve_auto(spec: dict[str, Any], host: Host) -> dict[str, Any]:
    """The cell with device and dtype as this machine has them, where they were left to it."""
    device = host.device if spec["device"] == "auto" else spec["device"]
    dtype = _AUTO_DTYPE[device] if spec["dtype"] == "auto" else spec["dtype"]
    return {**spec, "device": device, "dtype": dtype}


def _cells(
    outline: Outline,
    specs: Mapping[str, tuple[dict[str, Any], DataPath]],
    line_of: Callable[[DataPath], int | None],
) -> tuple[Cell, ...]:
    baselines: dict[str, dict[str, Any]] = {}
    baseline_of: dict[str, str] = {}
    for key, (spec, _) in specs.items():
        native = baseline_spec(spec)
        baseline_of[key] = content_hash(native)
        baselines[baseline_of[key]] = native
    whole = {**baselines, **{key: spec for key, (spec, _) in specs.items()}}
    varied = _varied(outline, list(whole.values()))
    return tuple(
        Cell(
            id=key[:12],
            name=",".join(f"{k}={text(spec[k])}" for k in varied if spec[k] is not None),
            spec=spec,
            varied=varied,
            baseline=baseline_of.get(key, key)[:12],
            line=line_of(specs[key][1]) if key in specs else None,
        )
        for key, spec in whole.items()
    )


def _varied(outline: Outline, specs: list[dict[str, Any]]) -> tuple[str, ...]:
    """Keys that differ between cells, axes first in their order; the format always, so that no name is empty. One model and
    the native one beside it are said once, not in every name."""
    named = [key for axis, points in outline.axes.items() for p in points for key in (axis, *p.values)]
    named += [key for entry in outline.include for key in entry.values]
    order = dict.fromkeys([*named, *CELL_KEYS])
    first = specs[0]
    left_out = MODEL_NAMES if one_model(specs) else ()
    varied = [key for key in order if key not in left_out and any(spec[key] != first[key] for spec in specs)]
    return tuple(varied if "kv_format" in varied else ["kv_format", *varied])
