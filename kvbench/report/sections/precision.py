"""The precision table: what was asked for, what was chosen, what the evidence shows, cell by cell.

A cell has one decision and one piece of evidence a task; here they are folded together, and the worst counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import origin
from kvbench.matrix.resolve import ASPECTS, AUTO
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, NOT_AVAILABLE, UNVERIFIED, VERIFIED, Record
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import NOT_MEASURED, fact, flatten, one_line, plain
from kvbench.report.model import JudgedRun

_WORST_FIRST = (MISMATCH, UNVERIFIED, NOT_AVAILABLE, VERIFIED, NOT_APPLICABLE)


@dataclass(frozen=True)
class ChoiceLine:
    """One aspect of the decision. requested: what the matrix asks; asked: what reached the resolver, which differs
    when a hop dropped the request; resolved is "" when no decision was taken; rejected: (option, reason) pairs.
    """

    aspect: str
    requested: str
    asked: str
    resolved: str
    reason: str
    rejected: tuple[tuple[str, str], ...]

    @property
    def dropped(self) -> bool:
        return self.requested != self.asked

    @property
    def fell_back(self) -> bool:
        """Declared: the resolver was asked for it and chose something else."""
        return bool(self.resolved) and not self.dropped and self.requested not in (AUTO, self.resolved)


@dataclass(frozen=True)
class LevelLine:
    """One level of evidence with one sentence, and the runners during which it was gathered."""

    name: str
    state: str
    sentence: str
    runners: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PrecisionLine:
    """scales: none, static (given), calibrated, file, checkpoint, default or dynamic, of the format that ran; state: verified, mismatch or unverified; storage, transfer, execution: precisions of the cache; effective_weights,
    stored_weights, products: format of the weights that the evidence shows, dtypes that they lie in, paths of their
    products ("native", or those of FP8 weights that ran: W8A16 and W8A8 are other numbers); ran_on: where attention ran by
    E4, torch, interpreter or gpu; reads: (record, tokens read from pages, of them quantized); chips: (state, names of
    the levels whose worst state it is) pairs, worst first.
    """

    label: Label
    choices: tuple[ChoiceLine, ...]
    effective: str
    scales: str
    state: str
    storage: str
    transfer: str
    execution: str
    effective_weights: str
    stored_weights: str
    products: str
    ran_on: str
    reads: tuple[tuple[str, int, int], ...]
    chips: tuple[tuple[str, str], ...]
    levels: tuple[LevelLine, ...]

    @property
    def kv(self) -> ChoiceLine:
        return self.choices[0]

    @property
    def weights(self) -> ChoiceLine:
        return self._choice("weights")

    @property
    def gemm(self) -> ChoiceLine:
        return self._choice("gemm")

    @property
    def backend(self) -> ChoiceLine:
        return self._choice("backend")

    def _choice(self, aspect: str) -> ChoiceLine:
        return next(choice for choice in self.choices if choice.aspect == aspect)


@dataclass(frozen=True)
class PrecisionGroup:
    """The cells of which the precision table says the same; `line` is the first of them. reads: of all, as text."""

    where: tuple[Label, ...]
    line: PrecisionLine
    reads: str


def grouped(lines: Sequence[PrecisionLine], labels: Labels) -> tuple[PrecisionGroup, ...]:
    """One bad cell of many stands out on a line of its own."""
    groups: dict[tuple[object, ...], list[PrecisionLine]] = {}
    for line in lines:
        key = (line.label.baseline, line.choices, line.effective, line.scales, line.state, line.storage, line.transfer,
               line.execution, line.effective_weights, line.stored_weights, line.products, line.chips)  # fmt: skip
        groups.setdefault(key, []).append(line)
    return tuple(
        PrecisionGroup(
            labels.places([cell for line in same for cell in line.label.cells]),
            same[0],
            _reads({read for line in same for read in line.reads}),
        )
        for same in groups.values()
    )


@dataclass(frozen=True)
class Proof:
    """The decision and evidence of all cells in which they are the same."""

    where: tuple[Label, ...]
    state: str
    choices: tuple[ChoiceLine, ...]
    levels: tuple[LevelLine, ...]


def proofs(lines: Sequence[PrecisionLine], labels: Labels) -> tuple[Proof, ...]:
    where: dict[tuple[str, tuple[ChoiceLine, ...], tuple[LevelLine, ...]], list[str]] = {}
    for line in lines:
        where.setdefault((line.state, line.choices, line.levels), []).extend(line.label.cells)
    return tuple(Proof(labels.places(cells), *key) for key, cells in where.items())


def precision_lines(run: JudgedRun, labels: Labels) -> tuple[PrecisionLine, ...]:
    of_cell: dict[str, list[Record]] = {cell: [] for cell in labels.cells}
    for record, task in run.done():
        for cell in task.cells:
            of_cell.setdefault(cell, []).append(record)
    lines = [_line(labels.cell(cell), labels.cells[cell].spec, of_cell[cell]) for cell in labels.cells]
    return tuple(sorted(lines, key=lambda line: labels.rank(line.label)))


def _line(label: Label, spec: Mapping[str, Any], records: Sequence[Record]) -> PrecisionLine:
    choices = tuple(_choice(aspect, spec, records) for aspect in ASPECTS)
    found = [record.evidence for record in records if record.evidence is not None]
    effective = _joined(evidence["effective"] for evidence in found)
    weights = _joined(evidence["effective_weights"] for evidence in found)
    levels = _levels(records)
    worst = {level.name: _worst(x.state for x in levels if x.name == level.name) for level in levels}
    names = {state: ", ".join(name for name in worst if worst[name] == state) for state in _WORST_FIRST}
    states = {level.state for level in levels} - {NOT_APPLICABLE}
    state = _worst(states) if states else UNVERIFIED
    if state == NOT_AVAILABLE:  # nothing of the cell contradicts, and some levels show nothing
        state = UNVERIFIED
    shown = {"kv_format": effective, "weights": weights}
    wrong = [
        c for c in choices if c.resolved and shown.get(c.aspect, c.resolved) not in (c.resolved, "unknown")
    ]
    if (found and wrong) or any(choice.dropped for choice in choices):
        state = MISMATCH
    return PrecisionLine(
        label=label,
        choices=choices,
        effective=effective,
        scales=_scales(spec, choices[0], records),
        state=state,
        storage=_joined(evidence["precision"].get("storage") for evidence in found),
        transfer=_joined(evidence["precision"].get("transfer") for evidence in found),
        execution=_joined(evidence["precision"].get("execution") for evidence in found),
        effective_weights=weights,
        stored_weights=_joined(evidence["precision"].get("weights") for evidence in found),
        products=_products(records),
        ran_on=_joined(
            level["facts"].get("backend")
            for evidence in found
            for level in evidence["levels"]
            if level["name"] == "E4"
        ),
        reads=tuple(_read(record.key, record.evidence) for record in records if record.evidence is not None),
        chips=tuple((state, text) for state, text in names.items() if text),
        levels=levels,
    )


def _scales(spec: Mapping[str, Any], kv: ChoiceLine, records: Sequence[Record]) -> str:
    """By the records, which know what a checkpoint had; by the cell where nothing ran."""
    if said := [record.facts["scale_kind"] for record in records if "scale_kind" in record.facts]:
        return _joined(said)
    fmt = KV_FORMATS.get(kv.resolved or kv.requested)
    return origin(fmt, spec.get("scale"))[0] if fmt else NOT_MEASURED


def _choice(aspect: str, spec: Mapping[str, Any], records: Sequence[Record]) -> ChoiceLine:
    """The aspect's choice; where the tasks of a cell chose differently, one that is not what the matrix asks."""
    choices = [record.decision[aspect] for record in records if record.decision and aspect in record.decision]
    requested = plain(spec.get(aspect))
    if not choices:
        return ChoiceLine(aspect, requested, requested, "", "", ())
    choice = next((c for c in choices if c["resolved"] != requested), choices[0])
    rejected = tuple((one_line(option), one_line(reason)) for option, reason in choice["rejected"])
    return ChoiceLine(
        aspect,
        requested,
        one_line(choice["requested"]),
        one_line(choice["resolved"]),
        one_line(choice["reason"]),
        rejected,
    )


def _levels(records: Sequence[Record]) -> tuple[LevelLine, ...]:
    """Equal sentences of several runners are one line; the worst state of a level comes first."""
    merged: dict[tuple[str, str, str], tuple[list[str], Mapping[str, Any]]] = {}
    for record in records:
        for level in record.evidence["levels"] if record.evidence else ():
            key = (one_line(level["name"]), level["state"], one_line(level["sentence"]))
            merged.setdefault(key, ([], level["facts"]))[0].append(record.runner)
    lines = [
        LevelLine(*key, tuple(dict.fromkeys(runners)), _facts(facts))
        for key, (runners, facts) in merged.items()
    ]
    return tuple(sorted(lines, key=lambda line: (line.name, _WORST_FIRST.index(line.state))))


def _facts(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(fact(key, value) for key, value in flatten(facts))


def _worst(states: Iterable[str]) -> str:
    return min(states, key=_WORST_FIRST.index)


def _products(records: Sequence[Record]) -> str:
    """The paths in the measured runs; where the model ran in none, those that the gemm runner took over its rows."""
    said = {
        path
        for record in records
        if record.evidence is not None
        for path in record.evidence["precision"].get("gemm", "").split(" and ")
    }
    ran = _joined(sorted(said))
    if ran != NOT_MEASURED:
        return ran
    gemm = (record.samples.get("products", ()) for record in records if record.runner == "gemm")
    return _joined(
        sorted({row["path"] for products in gemm for product in products for row in product["rows"]})
    )


def _joined(values: Iterable[str | None]) -> str:
    """One word when all tasks agree; otherwise all of them, so that a mixture is seen."""
    words = list(dict.fromkeys(one_line(value) for value in values if value))
    known = [word for word in words if word != NOT_MEASURED]
    return " + ".join(known or words[:1]) or NOT_MEASURED


def _read(key: str, evidence: Mapping[str, Any]) -> tuple[str, int, int]:
    return key, evidence["reads"].get("tokens", 0), evidence["reads"].get("quantized_tokens", 0)


def _reads(reads: Iterable[tuple[str, int, int]]) -> str:
    """Over the records, each counted once however many cells share it."""
    counts = list(reads)
    tokens = sum(count for _, count, _ in counts)
    quantized = sum(count for _, _, count in counts)
    if not tokens:
        return NOT_MEASURED
    return f"{quantized:,} of {tokens:,} tokens ({100 * quantized / tokens:.4g}%)"
