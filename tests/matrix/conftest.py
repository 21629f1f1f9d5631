"""Matrices from their text."""

import pytest

from kvbench.matrix.load import load


@pytest.fixture
def make(tmp_path):
    """make(text, ...): loads the text as m.yaml; `model` and `runners` are added."""

    def loads(text, *args, **kwargs):
        text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
        text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
        (tmp_path / "m.yaml").write_text(text)
        return load(tmp_path / "m.yaml", *args, **kwargs)

    return loads


@pytest.fixture
def picked():
    """picked(matrix, *keys): those keys of every cell."""
    return lambda matrix, *keys: [tuple(cell.spec[key] for key in keys) for cell in matrix.cells]
