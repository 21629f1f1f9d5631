"""docs/metrics.md is the table of metrics: it is written from it, and compared with it here."""

from __future__ import annotations

import re
from pathlib import Path

from kvbench.cli.metrics_page import SOURCES, UNITS, page
from kvbench.metrics.table import METRICS, UNIT_DOMAIN

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again: python -m kvbench.cli.metrics_page > docs/metrics.md"
    )


def test_every_metric_has_a_row_with_its_unit_definition_and_source() -> None:
    sections = {text.split("\n", 1)[0]: text for text in page().split("\n## ")[1:]}
    assert list(sections) == list(dict.fromkeys(m.runner for m in METRICS.values()))
    for metric in METRICS.values():
        text = sections[metric.runner]
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{metric.name}` |")]
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert cells == [
            f"`{metric.name}`",
            metric.unit,
            metric.better,
            "required" if metric.sampled else "",
            metric.definition,
        ]
        assert SOURCES[metric.runner] in text


def test_every_unit_and_every_runner_is_explained() -> None:
    assert list(UNITS) == list(UNIT_DOMAIN)
    assert set(SOURCES) == {m.runner for m in METRICS.values()}
