"""Matrix files that load: scalars as lists, the gate's place, and the matrices of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.load import load
from kvbench.matrix.runners import RUNNERS

ROOT = Path(__file__).parents[2]


def test_a22_t5_a_scalar_axis_is_a_list_of_one(make, picked):
    one = make("axes: {kv_format: int8_sym, batch: 8}")
    many = make("axes: {kv_format: [int8_sym], batch: [8]}")
    assert [c.id for c in one.cells] == [c.id for c in many.cells]
    assert picked(one, "kv_format", "batch") == [("native", 8), ("int8_sym", 8)]


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


def test_smoke_has_every_format_and_runner():
    matrix = load(ROOT / "matrices/smoke.yaml")
    assert {t.runner for t in matrix.tasks} == set(RUNNERS)
    assert {c.spec["kv_format"] for c in matrix.cells} == set(KV_FORMATS)
