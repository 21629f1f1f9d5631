"""Fixtures: runs made by `tests.factories.runs.reported`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories.runs.reported import Made, fail, make


@pytest.fixture
def passing() -> Made:
    return make()


@pytest.fixture
def failing() -> Made:
    return fail(make())


@pytest.fixture(scope="session")
def maker() -> Any:
    """`maker(formats=..., batches=..., contexts=..., fixed={...})`: a run of another shape."""
    return make


@pytest.fixture(scope="session")
def failed() -> Any:
    """`failed(made)`: that run, gone wrong in three ways."""
    return fail
