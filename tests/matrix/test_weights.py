"""Cells with FP8 weights: their baselines, the path of their products, and the model that native weights come
from."""

from __future__ import annotations

from kvbench.matrix.cells import one_model
from kvbench.matrix.expand import baseline_spec


def test_the_baseline_of_fp8_weights_has_native_weights_and_native_kv(make):
    matrix = make("axes: {weights: [fp8_block128], kv_format: [native, int8_sym]}")
    (baseline,) = [cell for cell in matrix.cells if cell.is_baseline]
    assert (baseline.spec["weights"], baseline.spec["kv_format"]) == ("native", "native")
    assert len(matrix.cells) == 3
    assert {cell.baseline for cell in matrix.cells} == {baseline.id}


def test_paths_are_varied_for_fp8_weights_only(make, picked):
    matrix = make("axes: {weights: [native, fp8_block128], gemm: [auto, reference, w8a8]}")
    assert picked(matrix, "weights", "gemm") == [
        ("native", "auto"), ("fp8_block128", "auto"), ("fp8_block128", "reference"), ("fp8_block128", "w8a8"),
    ]  # fmt: skip


def test_native_weights_run_on_the_model_that_is_named_for_them(make, picked):
    model = "{source: tiny-wide, revision: abc, native: tiny-llama}"
    matrix = make(f"model: {model}\naxes: {{weights: [native, fp8_block128]}}")
    assert picked(matrix, "weights", "model", "model_revision", "native_model") == [
        ("native", "tiny-llama", None, None), ("fp8_block128", "tiny-wide", "abc", "tiny-llama"),
    ]  # fmt: skip
    native, quantized = matrix.cells
    assert quantized.baseline == native.id


def test_one_model_and_its_unquantized_one_are_in_no_name(make):
    model = "{source: tiny-wide, revision: abc, native: tiny-llama}"
    matrix = make(f"model: {model}\naxes: {{weights: [native, fp8_block128], batch: [1, 2]}}")
    assert [cell.name for cell in matrix.cells] == [
        f"kv_format=native,weights={weights},batch={n}"
        for weights in ("native", "fp8_block128")
        for n in (1, 2)
    ]
    assert one_model([cell.spec for cell in matrix.cells]) == "tiny-wide@abc, native weights from tiny-llama"


def test_several_models_are_in_the_names(make):
    models = "[{source: tiny-wide, native: tiny-llama}, {source: tiny-qwen2, native: tiny-llama}]"
    matrix = make(f"axes: {{model: {models}, weights: [fp8_block128]}}")
    assert one_model([cell.spec for cell in matrix.cells]) is None
    assert all("model=" in cell.name for cell in matrix.cells)


def test_a_checkpoint_and_its_native_model_quantized_on_load_are_two_models(make):
    pair = make("model: {source: tiny-wide, native: tiny-llama}\naxes: {weights: [native, fp8_block128]}")
    alone = make("model: tiny-llama\naxes: {weights: [fp8_block128]}")
    assert one_model([cell.spec for cell in (*pair.cells, *alone.cells)]) is None
    assert one_model([cell.spec for cell in alone.cells]) == "tiny-llama"


def test_the_baseline_of_a_task_has_the_task_s_keys(make):
    spec = dict(
        make("model: {source: tiny-wide, native: tiny-llama}\naxes: {weights: [fp8_block128]}").cells[-1].spec
    )
    without = {key: value for key, value in spec.items() if key not in ("batch", "context")}
    assert baseline_spec(without) == {
        **without, "weights": "native", "model": "tiny-llama", "native_model": None}  # fmt: skip
