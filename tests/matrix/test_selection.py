"""`-k`: cells by an expression, with their baselines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbench.matrix.load import Matrix

Make = Callable[..., Matrix]
Refused = Callable[..., list[str]]
Picked = Callable[..., list[tuple[Any, ...]]]


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
def test_select_keeps_the_cells_and_their_baselines(make: Make, expression: str, rest: list[str]) -> None:
    whole, some = make(GRID), make(GRID, select=expression)
    chosen = [f"{c.spec['kv_format']} {c.spec['batch']}" for c in some.cells if not c.is_baseline]
    assert chosen == rest
    assert all(cell in whole.cells for cell in some.cells)  # names and ids as in the whole matrix
    wanted = {cell.baseline for cell in some.cells if not cell.is_baseline} or {
        c.id for c in whole.cells if c.is_baseline
    }
    assert {cell.id for cell in some.cells if cell.is_baseline} == wanted
    assert {task.key for task in some.tasks} <= {task.key for task in whole.tasks}


def test_select_finds_a_scale_by_its_value(make: Make, picked: Picked) -> None:
    matrix = make("axes: {kv_format: int8_static, scale: [0.05, 1]}", select="scale=5e-2")
    assert picked(matrix, "scale") == [(None,), (0.05,)]


def test_select_nothing_lists_the_cells(refused: Refused) -> None:
    assert refused(GRID, select="int8_sim") == [
        "-k 'int8_sim' selects no cell; the cells are:",
        "  kv_format=native,batch=1", "  kv_format=native,batch=16", "  kv_format=int8_sym,batch=1",
        "  kv_format=int8_sym,batch=16", "  kv_format=fp8_e4m3,batch=1", "  kv_format=fp8_e4m3,batch=16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "a key=value or a part of a cell's name is due where the end stands."),
        ("int8 and", "a key=value or a part of a cell's name is due where the end stands."),
        ("or int8", "a key=value or a part of a cell's name is due where 'or' stands."),
        ("(int8", "a parenthesis is not closed."),
        ("int8 fp8", "'fp8' is not expected there."),
        ("int8)", "')' is not expected there."),
        ("kv_fromat=native", "Did you mean kv_format?"),
    ],
)
def test_an_expression_that_cannot_be_read(refused: Refused, expression: str, why: str) -> None:
    assert f"{why} Write key=value words" in refused(GRID, select=expression)[0]
