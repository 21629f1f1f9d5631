"""Fixtures: runs made by `tests.factories.runs.reported`."""

import pytest

from tests.factories.runs.reported import fail, make


@pytest.fixture
def passing():
    return make()


@pytest.fixture
def failing():
    return fail(make())


@pytest.fixture(scope="session")
def maker():
    """`maker(formats=..., batches=..., contexts=..., fixed={...})`: a run of another shape."""
    return make
