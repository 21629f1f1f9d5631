"""Cells: complete, merged, with baselines; include and exclude as GitHub Actions has them; scales; weights."""

from pathlib import Path

import pytest

from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.cells import CELL_KEYS, one_model
from kvbench.matrix.expand import baseline_spec
from kvbench.matrix.load import Host, load
from kvbench.matrix.runners import RUNNERS

ROOT = Path(__file__).parents[2]
PAIR = "{source: tiny-wide, revision: abc, native: tiny-llama}"
STATIC = [("int8_static", n, 0.05) for n in (1, 2)]
TABLE = {
    "a model mapping becomes cell keys": (
        'model: {source: org/x, weights: random, revision: "010", trust_remote_code: true, plumbing: true}\n'
        "axes: {batch: 1}",
        "model model_weights model_revision trust_remote_code plumbing", [("org/x", "random", "010", True, True)]),
    "models may be an axis": (
        "axes: {model: [a, {source: b, weights: random}], kv_format: [native, int8_sym]}",
        "model model_weights kv_format",
        [(*model, kv) for kv in ("native", "int8_sym") for model in (("a", "checkpoint"), ("b", "random"))]),
    "a baseline keeps backend, page size and reads": (
        "axes: {kv_format: int8_sym}\nengine: {backend: triton, page_size: 32, prefill_reads: fresh}",
        "backend page_size prefill_reads", [("triton", 32, "fresh")] * 2),
    "a22_t5: a scalar axis is a list of one": (
        "axes: {kv_format: int8_sym, batch: 8}", "kv_format batch", [("native", 8), ("int8_sym", 8)]),
    "include extends and changes no axis": (
        "axes: {kv_format: [native, int8_sym], batch: [1, 4]}\nengine: {page_size: 16}\n"
        "include: [{batch: 4, page_size: 32}]", "kv_format batch page_size",
        [(kv, n, size) for kv in ("native", "int8_sym") for n, size in ((1, 16), (4, 32))]),
    "exclude matches in part and comes before include": (
        "axes: {kv_format: [native, int8_sym], batch: [1, 4], context: [8, 16]}\n"
        "exclude: [{batch: 4}, {kv_format: int8_sym, context: 8}]\n"
        "include: [{kv_format: int8_sym, batch: 4, context: 8}]", "kv_format batch context",
        [("native", 1, 8), ("native", 1, 16), ("native", 4, 8), ("int8_sym", 1, 16), ("int8_sym", 4, 8)]),
    "exclude compares scales too": (
        "axes: {kv_format: int8_static, scale: [0.05, {k: 1, v: 2}]}\nexclude: [{scale: {v: 2.0, k: 1.0}}]",
        "scale", [(None,), (0.05,)]),
    "scales of K, V and layers": (
        "axes: {kv_format: int8_static, scale: [{v: 0.1, k: 1}, {k: [1, 2], v: [0.5, 0.25]}]}", "scale",
        [(None,), ({"k": 1.0, "v": 0.1},), ({"k": [1.0, 2.0], "v": [0.5, 0.25]},)]),
    "include gives a static format its scale": (
        "axes: {kv_format: [native, int8_static], batch: [1, 2]}\n"
        "include: [{kv_format: int8_static, scale: 0.05}]", "kv_format batch scale",
        [("native", 1, None), ("native", 2, None), *STATIC]),
    "paths are varied for FP8 weights only": (
        "axes: {weights: [native, fp8_block128], gemm: [auto, reference, w8a8]}", "weights gemm",
        [("native", "auto"), *(("fp8_block128", path) for path in ("auto", "reference", "w8a8"))]),
    "native weights run on the model that is named for them": (
        f"model: {PAIR}\naxes: {{weights: [native, fp8_block128]}}",
        "weights model model_revision native_model",
        [("native", "tiny-llama", None, None), ("fp8_block128", "tiny-wide", "abc", "tiny-llama")]),
}  # fmt: skip


def names(matrix):
    return [cell.name for cell in matrix.cells]


@pytest.mark.parametrize(("text", "keys", "rows"), TABLE.values(), ids=TABLE)
def test_the_cells_of_a_matrix(make, picked, text, keys, rows):
    assert picked(make(text), *keys.split()) == rows


def test_cells_are_complete_and_frozen_for_the_host(make):
    text = "axes: {kv_format: int8_sym}"
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        for cell in make(text, host=Host(device)).cells:
            assert list(cell.spec) == list(CELL_KEYS)
            assert (cell.spec["device"], cell.spec["dtype"]) == (device, dtype)
    on_cpu = make(text + "\nengine: {device: cpu}", host=Host("cuda")).cells[0]
    assert on_cpu.spec["dtype"] == "float32"  # follows the cell's device, not the host's


def test_a11_t3_work_on_a_cpu_and_on_a_gpu_shares_no_task(make):
    text = "engine: {backend: triton, dtype: float32}\naxes: {kv_format: int8_sym}"
    cpu, gpu = ({task.key for task in make(text, host=Host(device)).tasks} for device in ("cpu", "cuda"))
    assert len(cpu) == len(gpu) > 1
    assert not cpu & gpu


def test_equal_cells_are_merged_when_auto_is_resolved(make):
    assert len(make("axes: {device: [auto, cpu], dtype: [float32, auto], batch: [1, 1]}").cells) == 1
    assert len(make("axes: {device: [auto, cpu]}", host=Host("cuda")).cells) == 2


def test_baselines_are_added_come_first_and_have_no_line(make):
    matrix = make("axes:\n  kv_format: [int8_sym, native]\n  batch: [1, 4]\n  weights: [fp8_block128]\n")
    kinds = [("native", "native"), ("int8_sym", "fp8_block128"), ("native", "fp8_block128")]
    assert names(matrix) == [f"kv_format={kv},batch={n},weights={w}" for kv, w in kinds for n in (1, 4)]
    first, second, *rest = matrix.cells
    assert (first.is_baseline, second.is_baseline, first.line, rest[0].line) == (True, True, None, 2)
    assert [cell.baseline for cell in rest] == [first.id, second.id] * 2
    given = make("axes:\n  kv_format:\n    - int8_sym\n    - native\n")
    assert [(c.name, c.line) for c in given.cells] == [("kv_format=native", 4), ("kv_format=int8_sym", 3)]


def test_include_as_in_the_github_actions_documentation(make, picked):
    # fruit: kv_format, animal: batch, color: page_size, shape: context; apple, pear, banana: int8_sym, ...
    matrix = make(
        "axes: {kv_format: [int8_sym, fp8_e4m3], batch: [1, 2]}\n"
        "include: [{page_size: 8}, {page_size: 32, batch: 1}, {kv_format: int8_sym, context: 64},\n"
        "          {kv_format: native}, {kv_format: native, batch: 2}]"
    )
    found = zip(picked(matrix, "kv_format", "batch", "page_size", "context"), matrix.cells, strict=True)
    written = [row for row, cell in found if cell.line or not cell.is_baseline]
    # The last two entries fit nothing: they are cells of their own, without what earlier entries added.
    assert sorted(written) == sorted([
        ("int8_sym", 1, 32, 64), ("int8_sym", 2, 8, 64), ("fp8_e4m3", 1, 32, 512), ("fp8_e4m3", 2, 8, 512),
        ("native", 1, 16, 512), ("native", 2, 16, 512),
    ])  # fmt: skip


def test_scale_axis_reaches_only_static_formats_and_names_are_short(make):
    matrix = make("axes: {kv_format: [native, int8_sym, int8_static, fp8_e4m3_static], scale: [0.05, 1]}")
    static = [f"kv_format={fmt},scale={x}" for fmt in ("int8_static", "fp8_e4m3_static") for x in (0.05, 1.0)]
    assert names(matrix) == ["kv_format=native", "kv_format=int8_sym", *static]
    assert {cell.baseline for cell in matrix.cells} == {matrix.cells[0].id}
    sides = names(make(TABLE["scales of K, V and layers"][0]))
    assert sides[1] == "kv_format=int8_static,scale=k1.0/v0.1"
    assert sides[2].startswith("kv_format=int8_static,scale=layers-")


def test_one_model_and_its_unquantized_one_are_in_no_name_and_several_in_all(make):
    matrix = make(f"model: {PAIR}\naxes: {{weights: [native, fp8_block128], batch: [1, 2]}}")
    assert names(matrix) == [
        f"kv_format=native,weights={w},batch={n}" for w in ("native", "fp8_block128") for n in (1, 2)
    ]
    assert one_model([cell.spec for cell in matrix.cells]) == "tiny-wide@abc, native weights from tiny-llama"
    models = "[{source: tiny-wide, native: tiny-llama}, {source: tiny-qwen2, native: tiny-llama}]"
    several = make(f"axes: {{model: {models}, weights: [fp8_block128]}}")
    assert one_model([cell.spec for cell in several.cells]) is None
    assert all("model=" in cell.name for cell in several.cells)
    # A checkpoint, and its native model quantized on load, are two models.
    alone = make("model: tiny-llama\naxes: {weights: [fp8_block128]}")
    assert one_model([cell.spec for cell in (*matrix.cells, *alone.cells)]) is None
    assert one_model([cell.spec for cell in alone.cells]) == "tiny-llama"


def test_the_baseline_of_a_task_has_the_task_s_keys(make):
    spec = make(f"model: {PAIR}\naxes: {{weights: [fp8_block128]}}").cells[-1].spec
    own = {key: value for key, value in spec.items() if key not in ("batch", "context")}
    native = {"weights": "native", "model": "tiny-llama", "model_revision": None, "native_model": None}
    assert baseline_spec(own) == own | native


def test_the_gate_is_found_beside_the_matrix(make, tmp_path):
    (tmp_path / "g.yaml").write_text("checks: []")
    assert make("axes: {batch: 1}\ngate: g.yaml").gate == tmp_path / "g.yaml"
    assert make("axes: {batch: 1}\ngate: ~").gate is None


@pytest.mark.parametrize(
    ("name", "cells", "tasks"),
    [("smoke", 12, 84), ("int8", 8, 40), ("int8_scales", 10, 30), ("fp8_kv", 24, 48), ("kv_h200", 33, 69),
     ("fp8_weights", 15, 33), ("fp8_quality", 4, 24)],
)  # fmt: skip
def test_the_shipped_matrices_load(name, cells, tasks):
    matrix = load(ROOT / f"matrices/{name}.yaml")
    assert (matrix.name, len(matrix.cells), len(matrix.tasks)) == (name, cells, tasks)
    assert matrix.gate.name == f"{name}.yaml"
    if name == "smoke":
        assert {t.runner for t in matrix.tasks} == set(RUNNERS)
        assert {c.spec["kv_format"] for c in matrix.cells} == set(KV_FORMATS)
