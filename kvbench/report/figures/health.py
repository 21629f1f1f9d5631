"""Numeric health of each layer's K and V, from the samples of the health runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.render.labels import Labels
from kvbench.report.figures.records import completed
from kvbench.report.model import JudgedRun


@dataclass(frozen=True)
class HealthLine:
    """One cell. tokens: length of the text; layers: ascending; sides: samples by (layer, "k" or "v")."""

    name: str
    tokens: int | None
    layers: tuple[int, ...]
    sides: Mapping[tuple[int, str], Mapping[str, Any]]


def health_lines(run: JudgedRun, labels: Labels) -> tuple[HealthLine, ...]:
    """The quantized cells in the matrix's order; native cells only if there are no others."""
    found: list[HealthLine] = []
    for record, _, cells in completed(run, labels, "health"):
        sides = {(side["layer"], side["side"]): side for side in record.samples.get("sides") or ()}
        layers = tuple(sorted({layer for layer, _ in sides}))
        if layers:
            name = labels.subject("health", cells[0]).text
            found.append(HealthLine(name, record.facts.get("tokens"), layers, sides))
    quantized = [line for line in found if any(side["codes_used"] for side in line.sides.values())]
    return tuple(quantized or found)
