"""The precision table: requested, resolved and effective precision of every cell.

A cell has one decision and one piece of evidence a task; here they are combined, and the worst counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import origin
from kvbench.matrix.resolve_backend import ASPECTS, AUTO
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, NOT_AVAILABLE, UNVERIFIED, VERIFIED, Record
from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED, fact, flatten, one_line, plain
from kvbench.report.model import JudgedRun

_WORST_FIRST = (MISMATCH, UNVERIFIED, NOT_AVAILABLE, VERIFIED, NOT_APPLICABLE)
# Cell keys that may be `auto`; tables have a further column for what they resolved to.
DECIDED = ("backend", "weights", "gemm", "decode", "compile")


@dataclass(frozen=True)
class ChoiceLine:
    """One aspect of the decision.

    requested: what the matrix asks for; asked: what reached the resolver, different if the request was
    dropped on the way; resolved: "" if no decision was taken; rejected: (option, reason) pairs.
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
    def dropped_text(self) -> str:
        return (
            f"The matrix requests {self.aspect} {self.requested}, but the resolver received {self.asked}: "
            "the request was dropped on the way."
        )

    @property
    def fell_back(self) -> bool:
        """Whether the resolver was asked for it and chose something else, with a reason."""
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
    """The precision of one cell.

    scales: none, static (given), calibrated, file, checkpoint, default or dynamic, of the format that ran;
    state: verified, mismatch or unverified; storage, transfer, execution: precisions of the cache;
    effective_weights, stored_weights: format of the weights by the evidence, and the dtypes in memory;
    products: paths of the linear layers ("native", or those of FP8 weights such as w8a16); ran_on: where
    attention ran by E4: torch, interpreter or gpu; reads: (record, tokens read from pages, of them
    quantized); chips: (state, names of the levels in that state) pairs, worst first.
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

    def choice(self, aspect: str) -> ChoiceLine:
        return next(choice for choice in self.choices if choice.aspect == aspect)


@dataclass(frozen=True)
class PrecisionGroup:
    """Cells with the same line in the precision table; line: the first one; reads: of all, as text."""

    where: tuple[Label, ...]
    line: PrecisionLine
    reads: str


def grouped(run: JudgedRun, lines: Sequence[PrecisionLine]) -> tuple[PrecisionGroup, ...]:
    """The lines of the precision table; a cell that differs from the others has its own."""
    groups: dict[PrecisionLine, list[PrecisionLine]] = {}
    for x in lines:
        label = Label("", (), (), x.label.baseline)
        groups.setdefault(replace(x, label=label, levels=(), reads=(), ran_on=""), []).append(x)
    found = []
    for same in groups.values():
        reads = {read for line in same for read in line.reads}  # each once however many cells share it
        tokens, quantized = sum(n for _, n, _ in reads), sum(n for _, _, n in reads)
        text = f"{quantized:,} of {tokens:,} tokens ({100 * quantized / max(1, tokens):.4g}%)"
        where = run.labels.places([cell for line in same for cell in line.label.cells])
        found.append(PrecisionGroup(where, same[0], text if tokens else NOT_MEASURED))
    return tuple(found)


@dataclass(frozen=True)
class Proof:
    """The decision and the evidence of all cells in which they are the same."""

    where: tuple[Label, ...]
    state: str
    choices: tuple[ChoiceLine, ...]
    levels: tuple[LevelLine, ...]


def proofs(run: JudgedRun, lines: Sequence[PrecisionLine]) -> tuple[Proof, ...]:
    keys = (((line.state, line.choices, line.levels), line.label.cells) for line in lines)
    return tuple(Proof(where, *key) for key, where in run.gathered(keys))


def precision_lines(run: JudgedRun) -> tuple[PrecisionLine, ...]:
    """A line for every cell, each baseline directly above the cells that are compared with it."""
    records: dict[str, list[Record]] = {cell: [] for cell in run.run.cells}
    for record, task in run.done():
        for cell in task.cells:
            records.setdefault(cell, []).append(record)
    lines = [_line(run.labels.cell(name), cell.spec, records[name]) for name, cell in run.run.cells.items()]
    return tuple(sorted(lines, key=lambda line: run.labels.rank(line.label)))


def _line(label: Label, spec: Mapping[str, Any], records: Sequence[Record]) -> PrecisionLine:
    found = [record.evidence for record in records if record.evidence is not None]
    choices, levels = tuple(_choice(aspect, spec, records) for aspect in ASPECTS), _levels(records)

    def precision(key: str) -> str:
        return _joined(evidence["precision"].get(key) for evidence in found)

    effective = _joined(evidence["effective"] for evidence in found)
    weights = _joined(evidence["effective_weights"] for evidence in found)
    e4 = [level for evidence in found for level in evidence["levels"] if level["name"] == "E4"]
    kinds = [record.facts["scale_kind"] for record in records if "scale_kind" in record.facts]
    fmt = KV_FORMATS.get(choices[0].resolved or choices[0].requested)
    # By the records, which know what a checkpoint had; by the cell where nothing ran.
    scales = _joined(kinds) if kinds else origin(fmt, spec.get("scale"))[0] if fmt else NOT_MEASURED
    worst = {level.name: _worst(x.state for x in levels if x.name == level.name) for level in levels}
    chips = ((state, ", ".join(name for name in worst if worst[name] == state)) for state in _WORST_FIRST)
    reads = ((r.key, r.evidence["reads"]) for r in records if r.evidence is not None)
    return PrecisionLine(
        label=label,
        choices=choices,
        effective=effective,
        scales=scales,
        state=_state(choices, levels, {"kv_format": effective, "weights": weights} if found else {}),
        storage=precision("storage"),
        transfer=precision("transfer"),
        execution=precision("execution"),
        effective_weights=weights,
        stored_weights=precision("weights"),
        products=_products(records),
        ran_on=_joined(level["facts"].get("backend") for level in e4),
        reads=tuple((key, read.get("tokens", 0), read.get("quantized_tokens", 0)) for key, read in reads),
        chips=tuple((state, text) for state, text in chips if text),
        levels=levels,
    )


def _state(choices: Sequence[ChoiceLine], levels: Sequence[LevelLine], effective: Mapping[str, str]) -> str:
    """The worst state of the levels; a mismatch if a request was dropped or another format ran."""
    ran = ((choice.resolved, effective.get(choice.aspect, choice.resolved)) for choice in choices)
    if any(a and b not in (a, "unknown") for a, b in ran) or any(choice.dropped for choice in choices):
        return MISMATCH
    states = {level.state for level in levels} - {NOT_APPLICABLE}
    worst = _worst(states) if states else UNVERIFIED
    return UNVERIFIED if worst == NOT_AVAILABLE else worst  # no contradiction, but some levels prove nothing


def _choice(aspect: str, spec: Mapping[str, Any], records: Sequence[Record]) -> ChoiceLine:
    """The aspect's choice; if the tasks of a cell chose differently, one that differs from the request."""
    choices = [record.decision[aspect] for record in records if record.decision and aspect in record.decision]
    requested = plain(spec.get(aspect))
    if not choices:
        return ChoiceLine(aspect, requested, requested, "", "", ())
    choice = next((c for c in choices if c["resolved"] != requested), choices[0])
    rejected = tuple((one_line(option), one_line(reason)) for option, reason in choice["rejected"])
    asked, resolved, reason = (one_line(choice[key]) for key in ("requested", "resolved", "reason"))
    return ChoiceLine(aspect, requested, asked, resolved, reason, rejected)


def _levels(records: Sequence[Record]) -> tuple[LevelLine, ...]:
    """Equal sentences of several runners are one line; the worst state of a level comes first."""
    merged: dict[tuple[str, str, str], tuple[list[str], Mapping[str, Any]]] = {}
    for record in records:
        for level in record.evidence["levels"] if record.evidence else ():
            key = (one_line(level["name"]), level["state"], one_line(level["sentence"]))
            merged.setdefault(key, ([], level["facts"]))[0].append(record.runner)
    lines = [
        LevelLine(*key, tuple(dict.fromkeys(runners)), tuple(fact(k, v) for k, v in flatten(facts)))
        for key, (runners, facts) in merged.items()
    ]
    return tuple(sorted(lines, key=lambda line: (line.name, _WORST_FIRST.index(line.state))))


def _worst(states: Iterable[str]) -> str:
    return min(states, key=_WORST_FIRST.index)


def _products(records: Sequence[Record]) -> str:
    """The paths in the measured runs; if the model ran in none, those of the gemm runner."""
    precisions = [record.evidence["precision"] for record in records if record.evidence is not None]
    ran = _joined(sorted({path for each in precisions for path in each.get("gemm", "").split(" and ")}))
    if ran != NOT_MEASURED:
        return ran
    products = [p for r in records if r.runner == "gemm" for p in r.samples.get("products", ())]
    return _joined(sorted({row["path"] for product in products for row in product["rows"]}))


def _joined(values: Iterable[str | None]) -> str:
    words = list(dict.fromkeys(one_line(value) for value in values if value))
    known = [word for word in words if word != NOT_MEASURED]
    return " + ".join(known or words[:1]) or NOT_MEASURED
