"""The pages of docs/reference/ are what the product says."""

from pathlib import Path

import pytest

from kvbench.cli.main import COMMANDS
from kvbench.cli.reference import FOLDER, PAGES
from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.units import UNITS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_current(name):
    text = (ROOT / FOLDER / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), "python -m kvbench.cli.reference writes the pages again"


def test_every_command_key_option_and_metric_has_a_place():
    heads = PAGES["cli.md"]().split("\n## ")[1:]
    assert [head.split("\n")[0] for head in heads] == list(COMMANDS)
    schema = PAGES["schema.md"]()
    options = {option for runner in RUNNERS.values() for option in runner.options}
    assert [key for key in (*CELL_OPTIONS, *options) if f"\n| `{key}` |" not in schema] == []
    metrics = PAGES["metrics.md"]()
    assert [m for m in METRICS if f"\n| `{m}` |" not in metrics] == []
    assert [u for u in UNITS if f"\n| {u} |" not in metrics] == []
