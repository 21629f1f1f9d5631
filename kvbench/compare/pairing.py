"""Pairs of the same work in two stored runs, and what makes two runs incomparable. Pure.

Cells are matched by their whole spec. Only the device and the model's name may differ: the device is named
with the result, and a model is identified by its content. A remaining cell that shares its name with one of
the other run is the same cell under another spec, which is reported as a difference.

Numbers are comparable only if protocol, options, data, model and spec are equal; `Pair.unlike` has a sentence
for each difference. The option that sets the sample size (`Option.looks`) may differ: the shared part is
compared. Times also depend on the machine, so a difference of machines is in `Pair.machine`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvbench.files import content_hash
from kvbench.matrix.cells import CELL_KEYS, MODEL_NAMES, Cell, Task, text
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import READERS, Row, derive, problem
from kvbench.records.record import Record
from kvbench.records.run import Run
from kvbench.render.labels import Labels

TIMED = ("latency", "transfer")  # runners whose times depend on the machine

# Keys that may differ between cells that are the same work; the strictest match wins.
_LOOSER: tuple[tuple[str, ...], ...] = ((), ("device",), MODEL_NAMES, ("device", *MODEL_NAMES))

# Keys of a record's environment: reported where they differ, and those that identify a machine.
_NAMED = ("kvbench", "python", "os", "omp_num_threads")
_PACKAGES = ("torch", "transformers", "triton")
_MACHINE = ("device", "cpu", "cpu_cores_usable", "threads")


@dataclass(frozen=True)
class Stored:
    """A run to compare. name: its name in sentences ("A"); path: its folder."""

    name: str
    path: str
    run: Run

    @cached_property
    def labels(self) -> Labels:
        return Labels(self.run)

    @cached_property
    def rows(self) -> dict[tuple[str, str, str], Row]:
        """Every derived value by (cell, metric, variant)."""
        return {(r.cell, r.metric, r.variant): r for r in derive(self.run)}


@dataclass(frozen=True)
class Side:
    """One run's part of a pair. record, native: of the task and of its baseline (None: this is the baseline,
    or the baseline has no result); missing: why there is no result, or ""."""

    run: Stored
    task: Task
    cell: str
    record: Record | None
    native: Record | None
    missing: str


@dataclass(frozen=True)
class Pair:
    """The same work in two runs. second: None where the second run does not have it. unlike, machine: see the
    module; named: other differences; shared: both runs hold the same record."""

    first: Side
    second: Side | None
    there: str  # the second run's name
    unlike: tuple[str, ...] = ()
    machine: str = ""
    named: tuple[str, ...] = ()
    shared: bool = False

    @property
    def runner(self) -> str:
        return self.first.task.runner


def pairs_of(first: Stored, second: Stored, chosen: Collection[str] | None = None) -> list[Pair]:
    """Each task of the first run on the chosen cells (ids of the first run; None: all), with the same work of
    the second."""
    cells = [c for c in first.run.manifest.cells if chosen is None or c.id in chosen]
    partner, strangers = match_cells(cells, second.run.manifest.cells)
    found = []
    for task in first.run.tasks:
        mine = [cell for cell in task.cells if chosen is None or cell in chosen]
        if not mine:
            continue
        work = task.runner, task.variant
        both = [cell for cell in mine if second.run.task_at(partner.get(cell, ""), *work)]
        namesakes = [cell for cell in mine if second.run.task_at(strangers.get(cell, ""), *work)]
        cell = next(iter((*both, *namesakes)), None)
        if cell is None:
            unlike = tuple(
                s for c in mine if c in strangers for s in _spec_words(first, second, c, strangers[c])
            )
            found.append(Pair(_side(first, task, mine[0]), None, second.name, unlike))
            continue
        at = partner[cell] if both else strangers[cell]
        same = second.run.task_at(at, *work)
        assert same is not None
        pair = _examined(Pair(_side(first, task, cell), _side(second, same, at), second.name))
        words = () if both else tuple(_spec_words(first, second, cell, at))
        found.append(replace(pair, unlike=(*words, *pair.unlike)))
    return found


def match_cells(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[dict[str, str], dict[str, str]]:
    """Ids, first -> second: of equal cells, and of remaining cells that share a name but not a spec."""
    partner: dict[str, str] = {}
    for ignored in _LOOSER:
        groups: list[dict[str, list[str]]] = [{}, {}]
        for group, cells, taken in zip(
            groups, (first, second), (partner, set(partner.values())), strict=True
        ):
            for cell in cells:
                if cell.id not in taken:
                    group.setdefault(_spec_key(cell.spec, ignored), []).append(cell.id)
        here, there = groups
        partner |= {
            ids[0]: there[key][0]
            for key, ids in here.items()
            if len(ids) == 1 and len(there.get(key, ())) == 1
        }
    left = {c.name: c.id for c in second if c.id not in partner.values()}
    return partner, {c.id: left[c.name] for c in first if c.id not in partner and c.name in left}


def _spec_key(spec: Mapping[str, Any], ignored: Collection[str]) -> str:
    """Keys that an older run does not have get their default."""
    return content_hash({k: v for k, v in {**CELL_KEYS, **spec}.items() if k not in ignored})


def _differing(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in {**own, **other}:
        if own.get(key) != other.get(key):
            yield key, own.get(key), other.get(key)


def _side(run: Stored, task: Task, cell: str) -> Side:
    record, native = run.run.record(task.key), run.run.record(task.baseline)
    missing = problem(record, run.run.manifest.not_run)
    return Side(run, task, cell, record, None if problem(native) else native, missing)


def _spec_words(first: Stored, second: Stored, here: str, there: str) -> Iterator[str]:
    """The differences between a cell and the one with its name in the other run."""
    own, other = first.run.cell(here), second.run.cell(there)
    for key, mine, theirs in _differing({**CELL_KEYS, **own.spec}, {**CELL_KEYS, **other.spec}):
        at = f"cell {_short(own.name)}: {key}"
        yield f"{at} is {_short(mine)} in {first.name} and {_short(theirs)} in {second.name}"


def _short(value: Any) -> str:
    line = " ".join(text(value).split())
    return line if len(line) <= 80 else f"{line[:79]}…"


def _examined(pair: Pair) -> Pair:
    """The pair with the differences of its two sides."""
    first, second = pair.first, pair.second
    assert second is not None
    a, b = first.run.name, second.run.name
    what = first.task.title
    unlike = [*_options(what, first, second), *_contents(what, first, second)]
    if not first.record or not second.record or first.missing or second.missing:
        return replace(pair, unlike=tuple(unlike))
    own, other = first.record, second.record
    if own.protocol != other.protocol:
        unlike.append(f"{what}: protocol version is {own.protocol} in {a} and {other.protocol} in {b}")
    for fact in READERS[pair.runner].FACTS if pair.runner in READERS else ():
        mine, theirs = own.facts.get(fact), other.facts.get(fact)
        if mine != theirs:
            unlike.append(f"{what}: {fact} is {_short(mine)} in {a} and {_short(theirs)} in {b}")

    def sentences(differing: Iterator[tuple[str, Any, Any]]) -> list[str]:
        return [f"{name} is {_short(x)} in {a} and {_short(y)} in {b}" for name, x, y in differing]

    return replace(
        pair,
        unlike=tuple(unlike),
        machine="; ".join(sentences(_machines(own.environment, other.environment))),
        named=tuple(
            dict.fromkeys(
                (*sentences(_environments(own.environment, other.environment)), *_undigested(first, second))
            )
        ),
        shared=own.started_at == other.started_at and own.samples == other.samples,
    )


def _options(what: str, first: Side, second: Side) -> Iterator[str]:
    declared = RUNNERS[first.task.runner].options if first.task.runner in RUNNERS else {}
    defaults = {name: option.default for name, option in declared.items() if not option.fans_out}
    own, other = ({**defaults, **side.task.options} for side in (first, second))
    for name, mine, theirs in _differing(own, other):
        if not (name in declared and declared[name].looks):
            yield (
                f"{what}: option {name} is {_short(mine)} in {first.run.name} and {_short(theirs)} in "
                f"{second.run.name}"
            )


_UNKNOWN = ("", "not available")


def _contents(what: str, first: Side, second: Side) -> Iterator[str]:
    """Differences of model and data, by their digests; where a run has none, of models by their names."""
    own, other = (side.task.digests for side in (first, second))
    a, b = first.run.name, second.run.name
    for part in ("model", "native"):
        mine, theirs = own.get(part), other.get(part)
        if mine and theirs and not {mine, theirs} & set(_UNKNOWN):
            if mine != theirs:
                word = "the model" if part == "model" else "the native model"
                yield f"{word} is {mine} in {a} and {theirs} in {b}"
        elif part == "model":
            specs = [{**CELL_KEYS, **side.task.spec} for side in (first, second)]
            for key in MODEL_NAMES:
                if specs[0][key] != specs[1][key]:
                    mine, theirs = (_short(spec[key]) for spec in specs)
                    yield f"{key} is {mine} in {a} and {theirs} in {b}, and not both have a digest of it"
    mine, theirs = own.get("data"), other.get("data")
    known = mine and theirs and not {*mine, *theirs} & set(_UNKNOWN)
    if known and mine != theirs:
        yield f"{what}: the data is {_short(mine)} in {a} and {_short(theirs)} in {b}"


def _undigested(first: Side, second: Side) -> Iterator[str]:
    silent = [s.run.name for s in (first, second) if not s.task.digests.get("model")]
    if silent:
        model = _short(first.task.spec.get("model"))
        names = " and ".join(silent)
        yield f"{names} hold no digest of the model; both name {model}, which is taken for the same one"


def _environments(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The reported differences of two environments: code, libraries, machine."""
    sources = [
        (env.get("identity") or {}).get("kvbench") for env in (own, other)
    ]  # only the code that measures
    if not all(sources):
        sources = [env.get("kvbench_source") for env in (own, other)]
    if sources[0] != sources[1]:
        yield "kvbench's source", sources[0], sources[1]
    for key in _NAMED:
        if own.get(key) != other.get(key):
            yield key, own.get(key), other.get(key)
    for package in _PACKAGES:
        mine, theirs = ((env.get("packages") or {}).get(package) for env in (own, other))
        if mine != theirs:
            yield package, mine, theirs
    if own.get("boot_id") and other.get("boot_id") and own["boot_id"] != other["boot_id"]:
        yield "the boot", own["boot_id"], other["boot_id"]
    yield from _machines(own, other)


def _machines(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What shows that two records come from two machines. An unnamed host shows nothing."""
    if own.get("host") and other.get("host") and own["host"] != other["host"]:
        yield "the host", own["host"], other["host"]
    for key in _MACHINE:
        if own.get(key) != other.get(key):
            yield key, own.get(key), other.get(key)
    mine, theirs = ([gpu.get("name") for gpu in env.get("gpus") or ()] for env in (own, other))
    if mine != theirs:
        yield "the GPU", ", ".join(map(str, mine)) or "none", ", ".join(map(str, theirs)) or "none"
    ids = [
        env["gpus"][0].get("uuid") if env.get("gpus") and env.get("device") == "cuda" else None
        for env in (own, other)
    ]
    if all(ids) and ids[0] != ids[1]:
        yield "the GPU's id", ids[0], ids[1]
