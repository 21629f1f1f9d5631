"""`-k`: cells by an expression, with their baselines."""

from __future__ import annotations

import pytest

from kvbench.errors import UsageError

GRID = "axes: {kv_format: [int8_sym, fp8_e4m3], batch: [1, 16], context: [8]}"


@pytest.mark.parametrize(
    ("expression", "rest"),
    [
        ("kv_format=int8_sym", ["int8_sym 1", "int8_sym 16"]),
        ("batch=1", ["int8_sym 1", "fp8_e4m3 1"]),
        ("batch=1 and int8", ["int8_sym 1"]),
        ("INT8 and not batch=1", ["int8_sym 16"]),
        ("not (batch=1 or fp8)", ["int8_sym 16"]),
        ("fp8 or int8 and batch=1", ["int8_sym 1", "fp8_e4m3 1", "fp8_e4m3 16"]),
        ("not not fp8", ["fp8_e4m3 1", "fp8_e4m3 16"]),
        ("kv_format=fp8_e4m3,batch=16", ["fp8_e4m3 16"]),
        ("kv_format=native", []),
        ("dtype=float32 and plumbing=false and scale=null and fp8 and batch=1", ["fp8_e4m3 1"]),
    ],
)
def test_select_keeps_the_cells_and_their_baselines(make, expression, rest):
    whole, some = make(GRID), make(GRID, select=expression)
    chosen = [f"{c.spec['kv_format']} {c.spec['batch']}" for c in some.cells if not c.is_baseline]
    assert chosen == rest
    assert all(cell in whole.cells for cell in some.cells)  # names and ids as in the whole matrix
    wanted = {cell.baseline for cell in some.cells if not cell.is_baseline} or {
        c.id for c in whole.cells if c.is_baseline
    }
    assert {cell.id for cell in some.cells if cell.is_baseline} == wanted
    assert {task.key for task in some.tasks} <= {task.key for task in whole.tasks}


def test_select_finds_a_scale_by_its_value(make, picked):
    matrix = make("axes: {kv_format: int8_static, scale: [0.05, 1]}", select="scale=5e-2")
    assert picked(matrix, "scale") == [(None,), (0.05,)]


@pytest.mark.parametrize(
    ("expression", "words"),
    [("int8_sim", "selects no cell; the cells are:\n  kv_format=native,batch=1\n"), ("", "the end"),
     ("int8 and", "the end"), ("or int8", "'or'"), ("(int8", "parenthesis"), ("int8 fp8", "'fp8'"),
     ("int8)", "')'"),
     ("kv_fromat=native", "Did you mean kv_format?")],
)  # fmt: skip
def test_an_expression_that_is_refused(make, expression, words):
    with pytest.raises(UsageError) as caught:
        make(GRID, select=expression)
    assert str(caught.value).startswith(f"-k {expression!r} ")
    assert words in str(caught.value)
