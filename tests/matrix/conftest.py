"""Matrices from their text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.matrix.document import ConfigError, Fault
from kvbench.matrix.load import Matrix, load

Make = Callable[..., Matrix]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(text, ...): loads the text as m.yaml; `model` and `runners` are added."""

    def loads(matrix: str, *args: Any, bare: bool = False, **kwargs: Any) -> Matrix:
        text = textwrap.dedent(matrix)
        if not bare:
            text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
            text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
        (tmp_path / "m.yaml").write_text(text)
        return load(tmp_path / "m.yaml", *args, **kwargs)

    return loads


@pytest.fixture
def refused(make: Make) -> Callable[..., tuple[Fault, ...]]:
    """refused(text, ...): the mistakes of a matrix."""

    def faults(matrix: str, *args: Any, **kwargs: Any) -> tuple[Fault, ...]:
        with pytest.raises(ConfigError) as caught:
            make(matrix, *args, **kwargs)
        return caught.value.faults

    return faults


@pytest.fixture
def picked() -> Callable[..., list[tuple[Any, ...]]]:
    """picked(matrix, *keys): those keys of every cell."""
    return lambda matrix, *keys: [tuple(cell.spec[key] for key in keys) for cell in matrix.cells]
