"""Cells with FP8 weights: their baselines, the path of their products, and the model that native weights come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbench.expand import baseline_spec
from kvbench.matrix import Matrix

Make = Callable[..., Matrix]
Picked = Callable[..., list[tuple[Any, ...]]]
Refused = Callable[..., list[str]]


def test_the_baseline_of_fp8_weights_has_native_weights_and_native_kv(make: Make) -> None:
    matrix = make("axes: {weights: [fp8_block128], kv_format: [native, int8_sym]}")
    (baseline,) = [cell for cell in matrix.cells if cell.is_baseline]
    assert (baseline.spec["weights"], baseline.spec["kv_format"]) == ("native", "native")
    assert len(matrix.cells) == 3
    assert {cell.baseline for cell in matrix.cells} == {baseline.id}


def test_paths_are_varied_for_fp8_weights_only(make: Make, picked: Picked) -> None:
    matrix = make("axes: {weights: [native, fp8_block128], gemm: [auto, reference, w8a8]}")
    assert picked(matrix, "weights", "gemm") == [
        ("native", "auto"), ("fp8_block128", "auto"), ("fp8_block128", "reference"), ("fp8_block128", "w8a8"),
    ]  # fmt: skip


def test_a_path_for_native_weights_is_a_mistake(refused: Refused) -> None:
    (line,) = refused("engine: {gemm: w8a8}\naxes: {kv_format: [native]}")
    assert line == (
        "m.yaml:1:16: gemm: w8a8 is given to a cell with native weights, which have no FP8 product; move it to axes, where it "
        "reaches only FP8 weights, or ask for weights: fp8_block128."
    )


def test_native_weights_run_on_the_model_that_is_named_for_them(make: Make, picked: Picked) -> None:
    matrix = make(
        """
        model: {source: tiny-wide, revision: abc, native: tiny-llama}
        axes: {weights: [native, fp8_block128]}
        """
    )
    assert picked(matrix, "weights", "model", "model_revision", "native_model") == [
        ("native", "tiny-llama", None, None),
        ("fp8_block128", "tiny-wide", "abc", "tiny-llama"),
    ]
    native, quantized = matrix.cells
    assert quantized.baseline == native.id


def test_the_baseline_of_a_task_has_the_task_s_keys(make: Make) -> None:
    spec = dict(
        make("model: {source: tiny-wide, native: tiny-llama}\naxes: {weights: [fp8_block128]}").cells[-1].spec
    )
    without = {key: value for key, value in spec.items() if key not in ("batch", "context")}
    assert baseline_spec(without) == {
        **without, "weights": "native", "model": "tiny-llama", "native_model": None}  # fmt: skip
