"""Scales of a quantized cache, layer by layer: what they are, where they come from, and whether each was shown to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import SOURCES
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun

UNKNOWN = "unknown: not what was asked for"
_READ = {True: "yes", False: "no", None: "unproven"}


@dataclass(frozen=True)
class ScaleRow:
    """One layer, as text. sides: (scale, source, read) of K and of V."""

    layer: int
    sides: tuple[tuple[str, str, str], tuple[str, str, str]]


@dataclass(frozen=True)
class Provenance:
    """The scales of all cells in which they are the same. summary: one line; source: what the record says of them in words."""

    where: tuple[Label, ...]
    summary: str
    source: str
    rows: tuple[ScaleRow, ...]


def provenances(run: JudgedRun, labels: Labels) -> tuple[Provenance, ...]:
    """Of the cells whose records have scales by layer, in the matrix's order."""
    of_cell: dict[str, list[Mapping[str, Any]]] = {}
    for record, task in run.done():
        if record.facts.get("scales"):
            for cell in task.cells:
                of_cell.setdefault(cell, []).append(record.facts)
    same: dict[tuple[str, str, tuple[ScaleRow, ...]], list[str]] = {}
    for cell in labels.cells:
        if facts := of_cell.get(cell):
            rows = _rows([entry for one in facts for entry in one["scales"]])
            source = one_line("; ".join(dict.fromkeys(str(one["scale_source"]) for one in facts)))
            same.setdefault((summary(rows), source, rows), []).append(cell)
    return tuple(Provenance(labels.places(cells), *key) for key, cells in same.items())


def summary(rows: Sequence[ScaleRow]) -> str:
    """`30 of 30 layers read: checkpoint 28, default 2`; of K and V apart where they come from different places."""
    read = sum(all(said == _READ[True] for _, _, said in row.sides) for row in rows)
    k, v = (Counter(row.sides[side][1] for row in rows) for side in range(2))
    said = _counted(k)
    if any(row.sides[0][1] != row.sides[1][1] for row in rows):
        said = f"K {said}; V {_counted(v)}"
    return f"{read} of {len(rows)} layers read: {said}"


def _counted(sources: Counter[str]) -> str:
    order = [*SOURCES, *sorted(set(sources) - set(SOURCES))]
    return ", ".join(f"{source} {sources[source]}" for source in order if sources[source])


def _rows(entries: Sequence[Mapping[str, Any]]) -> tuple[ScaleRow, ...]:
    """Entries of a cell's records: what differs between them is all shown, and a layer was read when every one says so."""
    of_layer: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        of_layer.setdefault(entry["layer"], []).append(entry)
    return tuple(
        ScaleRow(layer, (_side(found, "k"), _side(found, "v"))) for layer, found in sorted(of_layer.items())
    )


def _side(entries: Sequence[Mapping[str, Any]], side: str) -> tuple[str, str, str]:
    held = [entry[side] for entry in entries]
    ranges = [value for value in held if isinstance(value, list)]
    if ranges and len(ranges) == len(held):
        shown = f"{min(low for low, _ in ranges):.6g} to {max(high for _, high in ranges):.6g}"
    else:
        shown = " + ".join(dict.fromkeys("none" if value is None else f"{value:.6g}" for value in held))
    sources = dict.fromkeys(one_line(str(entry[f"{side}_source"] or UNKNOWN)) for entry in entries)
    said = {entry[f"{side}_read"] for entry in entries}
    read = False if False in said else None if None in said else True
    return shown, " + ".join(sources), _READ[read]
