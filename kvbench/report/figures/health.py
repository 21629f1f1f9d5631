"""Numeric health of each layer's K and V, a line a cell and side, from the samples of the health runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.records.record import OK
from kvbench.render.labels import Labels
from kvbench.report.model import JudgedRun


@dataclass(frozen=True)
class HealthLine:
    """sides: by (layer, "k" or "v"), as the runner stored them; layers: their numbers, ascending; tokens: of the text."""

    name: str
    tokens: int | None
    layers: tuple[int, ...]
    sides: Mapping[tuple[int, str], Mapping[str, Any]]


def health_lines(run: JudgedRun, labels: Labels) -> tuple[HealthLine, ...]:
    """Quantized cells in the matrix's order; native ones, which lose nothing and hold the same values, only where there are no others."""
    found: list[HealthLine] = []
    for record, task in run.done():
        cells = [cell for cell in task.cells if cell in labels.cells]
        if record.runner != "health" or record.status != OK or not cells or not record.samples.get("sides"):
            continue
        sides = {(side["layer"], side["side"]): side for side in record.samples["sides"]}
        layers = tuple(sorted({layer for layer, _ in sides}))
        found.append(
            HealthLine(labels.subject("health", cells[0]).text, record.facts.get("tokens"), layers, sides)
        )
    quantized = [line for line in found if any(side["codes_used"] for side in line.sides.values())]
    return tuple(quantized or found)
