"""Cells: complete, merged, with baselines; include and exclude as GitHub Actions has them; scales."""

from __future__ import annotations

from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.load import Host, Matrix


def names(matrix: Matrix) -> list[str]:
    return [cell.name for cell in matrix.cells]


def test_cells_are_complete_and_frozen_for_the_host(make):
    text = "axes: {kv_format: int8_sym}"
    for host, device, dtype in ((Host("cpu"), "cpu", "float32"), (Host("cuda"), "cuda", "bfloat16")):
        for cell in make(text, host=host).cells:
            assert list(cell.spec) == list(CELL_KEYS)
            assert (cell.spec["device"], cell.spec["dtype"]) == (device, dtype)
    on_cpu = make(text + "\nengine: {device: cpu}", host=Host("cuda")).cells[0]
    assert on_cpu.spec["dtype"] == "float32"  # follows the cell's device, not the host's


def test_a11_t3_work_on_a_cpu_and_on_a_gpu_shares_no_task(make):
    """The device is in every key; whether Triton is interpreted is another part of it
    (test_environment.py)."""
    text = "engine: {backend: triton, dtype: float32}\naxes: {kv_format: int8_sym}"
    cpu, gpu = ({task.key for task in make(text, host=Host(device)).tasks} for device in ("cpu", "cuda"))
    assert len(cpu) == len(gpu) > 1
    assert not cpu & gpu


def test_equal_cells_are_merged_when_auto_is_resolved(make):
    matrix = make("axes: {device: [auto, cpu], dtype: [float32, auto], batch: [1, 1]}")
    assert len(matrix.cells) == 1
    assert len(make("axes: {device: [auto, cpu]}", host=Host("cuda")).cells) == 2


def test_a_model_mapping_becomes_cell_keys(make, picked):
    model = '{source: org/x, weights: random, revision: "010", trust_remote_code: true, plumbing: true}'
    keys = ("model", "model_weights", "model_revision", "trust_remote_code", "plumbing")
    assert picked(make(f"model: {model}\naxes: {{batch: 1}}"), *keys) == [
        ("org/x", "random", "010", True, True)
    ]


def test_models_may_be_an_axis(make, picked):
    matrix = make("axes: {model: [a, {source: b, weights: random}], kv_format: [native, int8_sym]}")
    assert picked(matrix, "model", "model_weights", "kv_format") == [
        ("a", "checkpoint", "native"), ("b", "random", "native"),
        ("a", "checkpoint", "int8_sym"), ("b", "random", "int8_sym"),
    ]  # fmt: skip
    assert matrix.cells[1].name == "model=b,model_weights=random,kv_format=native"


def test_baselines_are_added_come_first_and_have_no_line(make):
    matrix = make("axes:\n  kv_format: [int8_sym, native]\n  batch: [1, 4]\n  weights: [fp8_block128]\n")
    kinds = [("native", "native"), ("int8_sym", "fp8_block128"), ("native", "fp8_block128")]
    assert names(matrix) == [f"kv_format={kv},batch={n},weights={w}" for kv, w in kinds for n in (1, 4)]
    first, second, *rest = matrix.cells
    assert (first.is_baseline, second.is_baseline, first.line, rest[0].line) == (True, True, None, 2)
    assert [cell.baseline for cell in rest] == [first.id, second.id] * 2


def test_a_baseline_of_the_matrix_keeps_its_line_and_is_not_doubled(make):
    matrix = make("axes:\n  kv_format:\n    - int8_sym\n    - native\n")
    assert [(c.name, c.line) for c in matrix.cells] == [("kv_format=native", 4), ("kv_format=int8_sym", 3)]


def test_baseline_keeps_backend_page_size_and_reads(make, picked):
    matrix = make(
        "axes: {kv_format: int8_sym}\nengine: {backend: triton, page_size: 32, prefill_reads: fresh}"
    )
    assert picked(matrix, "backend", "page_size", "prefill_reads") == [("triton", 32, "fresh")] * 2


def test_include_as_in_the_github_actions_documentation(make, picked):
    # fruit -> kv_format, animal -> batch, color -> page_size, shape -> context; apple, pear, banana ->
    # int8_sym, fp8_e4m3, native
    matrix = make(
        """\
        axes: {kv_format: [int8_sym, fp8_e4m3], batch: [1, 2]}
        include:
          - {page_size: 8}
          - {page_size: 32, batch: 1}
          - {kv_format: int8_sym, context: 64}
          - {kv_format: native}
          - {kv_format: native, batch: 2}
        """
    )
    found = zip(picked(matrix, "kv_format", "batch", "page_size", "context"), matrix.cells, strict=True)
    written = [row for row, cell in found if cell.line or not cell.is_baseline]
    # The last two entries fit nothing: they are cells of their own, without what earlier entries added.
    assert sorted(written) == sorted([
        ("int8_sym", 1, 32, 64), ("int8_sym", 2, 8, 64), ("fp8_e4m3", 1, 32, 512), ("fp8_e4m3", 2, 8, 512),
        ("native", 1, 16, 512), ("native", 2, 16, 512),
    ])  # fmt: skip


def test_include_extends_without_changing_an_axis_and_may_replace_a_fixed_key(make, picked):
    axes = "axes: {kv_format: [native, int8_sym], batch: [1, 4]}"
    matrix = make(f"{axes}\nengine: {{page_size: 16}}\ninclude: [{{batch: 4, page_size: 32}}]")
    rows = picked(matrix, "kv_format", "batch", "page_size")
    assert rows == [("native", 1, 16), ("native", 4, 32), ("int8_sym", 1, 16), ("int8_sym", 4, 32)]


def test_exclude_matches_in_part_and_comes_before_include(make, picked):
    matrix = make(
        """\
        axes: {kv_format: [native, int8_sym], batch: [1, 4], context: [8, 16]}
        exclude:
          - {batch: 4}
          - {kv_format: int8_sym, context: 8}
        include:
          - {kv_format: int8_sym, batch: 4, context: 8}
        """
    )
    assert picked(matrix, "kv_format", "batch", "context") == [
        ("native", 1, 8), ("native", 1, 16), ("native", 4, 8), ("int8_sym", 1, 16), ("int8_sym", 4, 8),
    ]  # fmt: skip


def test_exclude_compares_scales_too(make, picked):
    axes = "axes: {kv_format: int8_static, scale: [0.05, {k: 1, v: 2}]}"
    assert picked(make(f"{axes}\nexclude: [{{scale: {{v: 2.0, k: 1.0}}}}]"), "scale") == [(None,), (0.05,)]


def test_scale_axis_reaches_only_static_formats(make):
    matrix = make("axes: {kv_format: [native, int8_sym, int8_static, fp8_e4m3_static], scale: [0.05, 1]}")
    static = [f"kv_format={fmt},scale={x}" for fmt in ("int8_static", "fp8_e4m3_static") for x in (0.05, 1.0)]
    assert names(matrix) == ["kv_format=native", "kv_format=int8_sym", *static]
    assert {cell.baseline for cell in matrix.cells} == {matrix.cells[0].id}


def test_scale_for_k_and_v_and_for_layers(make, picked):
    matrix = make("axes: {kv_format: int8_static, scale: [{v: 0.1, k: 1}, {k: [1, 2], v: [0.5, 0.25]}]}")
    assert picked(matrix, "scale")[1:] == [({"k": 1.0, "v": 0.1},), ({"k": [1.0, 2.0], "v": [0.5, 0.25]},)]
    assert names(matrix)[1] == "kv_format=int8_static,scale=k1.0/v0.1"
    assert names(matrix)[2].startswith("kv_format=int8_static,scale=layers-")


def test_include_gives_a_static_format_its_scale(make, picked):
    axes = "axes: {kv_format: [native, int8_static], batch: [1, 2]}"
    matrix = make(f"{axes}\ninclude: [{{kv_format: int8_static, scale: 0.05}}]")
    assert picked(matrix, "kv_format", "batch", "scale")[2:] == [("int8_static", n, 0.05) for n in (1, 2)]
