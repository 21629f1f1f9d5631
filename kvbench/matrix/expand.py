"""A matrix file becomes cells: combinations by the rules of GitHub Actions, with a native baseline for each.

1. The cross product of the axes, in the order of the file; none when there are no axes.
2. `exclude` drops the combinations that agree with every key of an entry.
3. Each `include` entry is added to every combination of step 1 whose axis values it does not change; it may
   change values that an earlier entry added. An entry that fits no combination becomes a cell of its own, to
   which later entries do not add.
4. The other keys come from the fixed keys (`model`, `engine`) and the defaults, `auto` is resolved, and equal
   cells are merged.
5. Every cell gets its baseline, the same cell with native KV and weights, added where the matrix lacks it.
   Cells with native weights run on `native_model` where one is named.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import content_hash
from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import WORDS, of_file, read
from kvbench.machine.host import Host
from kvbench.matrix.cells import CELL_KEYS, MODEL_NAMES, Cell, one_model, text
from kvbench.matrix.document import DataPath, Problems
from kvbench.matrix.parse import MatrixFile, Point

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


def expand(file: MatrixFile, host: Host, problems: Problems, folder: Path) -> tuple[Cell, ...]:
    """The cells, baselines first, then in matrix order; () after a problem. folder: of scale files."""
    before = len(problems.faults)
    combinations = _combinations(file)
    if not combinations and file.axes:
        sentence = "exclude leaves no cell; remove an entry, or add cells under include."
        problems.add(("exclude",), sentence, "no_cell")
    elif not combinations:
        sentence = (
            "the matrix has no cell: axes and include are empty, and engine only fixes keys of their cells; "
            "add axes: {kv_format: [native, int8_sym]}."
        )
        problems.add((), sentence, "no_cell")
    if any("model" not in {**file.fixed, **c.axis, **c.added} for c in combinations):
        sentence = "no model is named; add one at the top, as in model: smollm2-135m-instruct."
        problems.add((), sentence, "no_model")
    specs: dict[str, tuple[dict[str, Any], DataPath]] = {}
    used_scale = False
    for combination in combinations:
        spec = {**CELL_KEYS, **file.fixed, **combination.axis, **combination.added}
        if KV_FORMATS[spec["kv_format"]].scale_kind == "static":
            used_scale = used_scale or "scale" in combination.axis
        _settle_scale(spec, combination, file, problems)
        if isinstance(spec["scale"], str) and spec["scale"] not in WORDS:
            _read_scale(spec, file, problems, folder)
        _settle_gemm(spec, combination, problems)
        spec = _on_native_model(resolve_auto(spec, host))
        specs.setdefault(content_hash(spec), (spec, combination.path))
    if "scale" in file.axes and not used_scale and combinations:
        sentence = "scale is an axis, but no static format uses it; add a static format, or remove the axis."
        problems.add(("axes", "scale"), sentence, "unused")
    return () if len(problems.faults) > before else _cells(file, specs, problems)


def _combinations(file: MatrixFile) -> list[_Combination]:
    originals, alone = [], []
    for points in itertools.product(*file.axes.values()) if file.axes else ():
        values = {key: value for point in points for key, value in point.values.items()}
        if not any(entry.values.items() <= values.items() for entry in file.exclude):
            # Its place is that of its format, or of the axes when the format is fixed.
            place = (p.path for axis, p in zip(file.axes, points, strict=True) if axis == "kv_format")
            originals.append(_Combination(values, next(place, ("axes",))))
    for entry in file.include:
        fitting = [c for c in originals if c.fits(entry)]
        for combination in fitting:
            combination.add(entry)
        if not fitting:
            alone.append(_Combination({}, entry.path))
            alone[-1].add(entry)
    return originals + alone


def _settle_scale(
    spec: dict[str, Any], combination: _Combination, file: MatrixFile, problems: Problems
) -> None:
    """Static formats need a scale. For others an axis of scales is ignored, any other scale refused."""
    name, added = spec["kv_format"], combination.added_at
    if KV_FORMATS[name].scale_kind == "static":
        if spec["scale"] is None:
            path = added.get("kv_format", combination.path)
            fixed = "kv_format" in file.fixed and path == ("axes",)
            how = "add one, as in scale: 0.05 or scale: checkpoint, or measure one: kvbench calibrate."
            path = ("engine", "kv_format") if fixed else path
            problems.add(path, f"{name} needs a scale; {how}", "missing_scale")
        return
    static = ", ".join(f.name for f in KV_FORMATS.values() if f.scale_kind == "static")
    if combination.added.get("scale") is not None:
        sentence = f"{name} takes no scale; give the scale to a static format ({static})."
        problems.add(added["scale"], sentence, "unused")
    elif spec["scale"] is not None and "scale" not in combination.axis:
        sentence = (
            f"scale is fixed for every cell, but {name} takes no scale; move it to axes, where it applies "
            f"only to the static formats ({static})."
        )
        problems.add(("engine", "scale"), sentence, "unused")
    spec["scale"] = None


def _read_scale(spec: dict[str, Any], file: MatrixFile, problems: Problems, folder: Path) -> None:
    """Replaces the name of a scale file by its content, where the file is for the cell's format."""
    name = spec["scale"]
    points = [*(p for axis in file.axes.values() for p in axis), *file.include]
    path = next((p.path for p in points if p.values.get("scale") == name), ("engine", "scale"))
    try:
        spec["scale"] = read(folder / name)
    except UsageError as e:
        problems.add(path, str(e), "scale_file")
        return
    if (made_for := (of_file(spec["scale"]) or {}).get("format")) != spec["kv_format"]:
        sentence = (
            f"the scale file {name} is for {made_for}, and the cell has {spec['kv_format']}; remove that "
            "combination with exclude, or calibrate for it: kvbench calibrate MODEL OUT.json --format "
            f"{spec['kv_format']}."
        )
        problems.add(path, sentence, "scale_format")


def _settle_gemm(spec: dict[str, Any], combination: _Combination, problems: Problems) -> None:
    """Native weights have one path: for them an axis of paths is ignored, and any other path refused."""
    if spec["weights"] != "native" or spec["gemm"] == "auto":
        return
    if "gemm" not in combination.axis:
        sentence = (
            f"gemm: {spec['gemm']} does not apply to native weights, which have no FP8 product; move it to "
            "axes, where it applies only to FP8 weights, or set weights: fp8_block128."
        )
        problems.add(combination.added_at.get("gemm", ("engine", "gemm")), sentence, "unused")
    spec["gemm"] = "auto"


def baseline_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of the native baseline, with the same keys: all of a cell's, or those of a task."""
    native = _on_native_model({**spec, **BASELINE})
    return {key: native[key] for key in spec}


def _on_native_model(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec on the unquantized model, for cells with native weights where one is named."""
    if spec["weights"] != "native" or spec["native_model"] is None:
        return spec
    return {**spec, "model": spec["native_model"], "model_revision": None, "native_model": None}


def resolve_auto(spec: dict[str, Any], host: Host) -> dict[str, Any]:
    """The spec with `auto` of device and dtype replaced by what this machine has."""
    device = host.device if spec["device"] == "auto" else spec["device"]
    dtype = _AUTO_DTYPE[device] if spec["dtype"] == "auto" else spec["dtype"]
    return {**spec, "device": device, "dtype": dtype}


def _cells(
    file: MatrixFile, specs: Mapping[str, tuple[dict[str, Any], DataPath]], problems: Problems
) -> tuple[Cell, ...]:
    natives = {key: baseline_spec(spec) for key, (spec, _) in specs.items()}
    baseline_of = {key: content_hash(native) for key, native in natives.items()}
    baselines = {baseline_of[key]: native for key, native in natives.items()}
    whole = {**baselines, **{key: spec for key, (spec, _) in specs.items()}}
    varied = _varied(file, list(whole.values()))
    return tuple(
        Cell(
            id=key[:12],
            name=",".join(f"{k}={text(spec[k])}" for k in varied if spec[k] is not None),
            spec=spec,
            varied=varied,
            baseline=baseline_of.get(key, key)[:12],
            line=problems.document.mark(specs[key][1])[0] or None if key in specs else None,
        )
        for key, spec in whole.items()
    )


def _varied(file: MatrixFile, specs: list[dict[str, Any]]) -> tuple[str, ...]:
    """The keys that differ between cells, axes first in their order, and always the format. Names leave out
    the model where all cells have one (and its native one)."""
    named = [key for axis, points in file.axes.items() for p in points for key in (axis, *p.values)]
    named += [key for entry in file.include for key in entry.values]
    order = dict.fromkeys([*named, *CELL_KEYS])
    first = specs[0]
    left_out = MODEL_NAMES if one_model(specs) else ()
    varied = [key for key in order if key not in left_out and any(spec[key] != first[key] for spec in specs)]
    return tuple(varied if "kv_format" in varied else ["kv_format", *varied])
