"""Scales of a quantized cache by layer: values, sources, and whether each was shown to be read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import SOURCES
from kvbench.render.labels import Label
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun

UNKNOWN = "unknown: not the requested one"
_READ = {True: "yes", False: "no", None: "unproven"}


@dataclass(frozen=True)
class ScaleRow:
    """One layer as text. sides: (scale, source, read) of K and of V."""

    layer: int
    sides: tuple[tuple[str, str, str], tuple[str, str, str]]


@dataclass(frozen=True)
class Provenance:
    """The scales of all cells with the same ones. summary: one line; source: the records' description."""

    where: tuple[Label, ...]
    summary: str
    source: str
    rows: tuple[ScaleRow, ...]


def provenances(run: JudgedRun) -> tuple[Provenance, ...]:
    """The scales of the cells whose records have them, in the matrix's order."""
    facts_of: dict[str, list[Mapping[str, Any]]] = {}
    for record, task in run.done():
        if record.facts.get("scales"):
            for cell in task.cells:
                facts_of.setdefault(cell, []).append(record.facts)
    same = []
    for cell in filter(facts_of.get, run.run.cells):
        rows = _rows([entry for facts in facts_of[cell] for entry in facts["scales"]])
        source = one_line("; ".join(dict.fromkeys(str(facts["scale_source"]) for facts in facts_of[cell])))
        same.append(((summary(rows), source, rows), (cell,)))
    return tuple(Provenance(where, *key) for key, where in run.gathered(same))


def summary(rows: Sequence[ScaleRow]) -> str:
    """`30 of 30 layers read: checkpoint 28, default 2`; K and V separately where their sources differ."""
    read = sum(all(state == _READ[True] for _, _, state in row.sides) for row in rows)
    texts = []
    for sources in (Counter(row.sides[side][1] for row in rows) for side in range(2)):
        order = [*SOURCES, *sorted(set(sources) - set(SOURCES))]
        texts.append(", ".join(f"{source} {sources[source]}" for source in order if sources[source]))
    apart = any(row.sides[0][1] != row.sides[1][1] for row in rows)
    counts = f"K {texts[0]}; V {texts[1]}" if apart else texts[0]
    return f"{read} of {len(rows)} layers read: {counts}"


def _rows(entries: Sequence[Mapping[str, Any]]) -> tuple[ScaleRow, ...]:
    of_layer: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        of_layer.setdefault(entry["layer"], []).append(entry)
    layers = sorted(of_layer.items())
    return tuple(ScaleRow(layer, (_side(found, "k"), _side(found, "v"))) for layer, found in layers)


def _side(entries: Sequence[Mapping[str, Any]], side: str) -> tuple[str, str, str]:
    values = [entry[side] for entry in entries]
    ranges = [value for value in values if isinstance(value, list)]
    if ranges and len(ranges) == len(values):
        shown = f"{min(low for low, _ in ranges):.6g} to {max(high for _, high in ranges):.6g}"
    else:
        shown = " + ".join(dict.fromkeys("none" if value is None else f"{value:.6g}" for value in values))
    sources = dict.fromkeys(one_line(str(entry[f"{side}_source"] or UNKNOWN)) for entry in entries)
    states = {entry[f"{side}_read"] for entry in entries}
    read = False if False in states else None if None in states else True  # read only if every record says so
    return shown, " + ".join(sources), _READ[read]
