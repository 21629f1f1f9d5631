"""Runs of the report's tests: `tests.factories.runs.reported` makes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories.runs.reported import Made, Outcome, fail, make


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


@pytest.fixture
def outcome() -> type[Outcome]:
    return Outcome
