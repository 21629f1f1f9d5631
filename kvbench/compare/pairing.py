"""Pairs of the same work in two stored runs, and what makes two runs incomparable. Pure.

Cells are matched by their whole spec. Only the device and the model's name may differ: the device is named
with the result, and a model is identified by its content. A remaining cell that shares its name with one of
the other run is the same cell under another spec, which is reported as a difference.

Protocol, options, data, model and spec must be equal; `Pair.unlike` has a sentence for each difference. The
sample size (`Option.looks`) may differ: the shared part is compared. Times also depend on `Pair.machine`.
"""

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
    """One run's part of a pair."""

    run: Stored
    task: Task
    cell: str
    record: Record | None
    native: Record | None  # the baseline's; None: this is the baseline, or the baseline has no result
    missing: str  # why there is no result, or ""


@dataclass(frozen=True)
class Pair:
    """The same work in two runs. unlike, machine: see the module."""

    first: Side
    second: Side | None  # None where the second run does not have it
    there: str  # the second run's name
    unlike: tuple[str, ...] = ()
    machine: str = ""
    named: tuple[str, ...] = ()  # other differences
    shared: bool = False  # both runs hold the same record

    @property
    def runner(self) -> str:
        return self.first.task.runner


def pairs_of(first: Stored, second: Stored, chosen: Collection[str] | None = None) -> list[Pair]:
    """Each task of the first run on the chosen cells (ids; None: all), with the same work of the second."""
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
            known = [c for c in mine if c in strangers]
            unlike = tuple(s for c in known for s in _spec_words(first, second, c, strangers[c]))
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
        here, there = _by_spec(first, partner, ignored), _by_spec(second, partner.values(), ignored)
        alone = [key for key, ids in here.items() if len(ids) == len(there.get(key, ())) == 1]
        partner |= {here[key][0]: there[key][0] for key in alone}
    left = {c.name: c.id for c in second if c.id not in partner.values()}
    return partner, {c.id: left[c.name] for c in first if c.id not in partner and c.name in left}


def _by_spec(cells: Sequence[Cell], taken: Collection[str], ignored: Collection[str]) -> dict[str, list[str]]:
    """Ids of cells that are not taken, by spec; keys that an older run does not have get their default."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell.id not in taken:
            spec = {k: v for k, v in {**CELL_KEYS, **cell.spec}.items() if k not in ignored}
            found.setdefault(content_hash(spec), []).append(cell.id)
    return found


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

    environments = own.environment, other.environment
    machine = "; ".join(sentences(_machines(*environments)))
    named = tuple(dict.fromkeys((*sentences(_environments(*environments)), *_undigested(first, second))))
    same = own.started_at == other.started_at and own.samples == other.samples
    return replace(pair, unlike=tuple(unlike), machine=machine, named=named, shared=same)


def _options(what: str, first: Side, second: Side) -> Iterator[str]:
    declared = RUNNERS[first.task.runner].options if first.task.runner in RUNNERS else {}
    defaults = {name: option.default for name, option in declared.items() if not option.fans_out}
    own, other = ({**defaults, **side.task.options} for side in (first, second))
    for name, mine, theirs in _differing(own, other):
        if not (name in declared and declared[name].looks):
            here, there = first.run.name, second.run.name
            yield f"{what}: option {name} is {_short(mine)} in {here} and {_short(theirs)} in {there}"


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
    # Only the code that measures.
    sources = [(env.get("identity") or {}).get("kvbench") for env in (own, other)]
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
    yield from _known_apart("the boot", own.get("boot_id"), other.get("boot_id"))
    yield from _machines(own, other)


def _known_apart(name: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if mine and theirs and mine != theirs:
        yield name, mine, theirs


def _machines(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What shows that two records come from two machines. An unnamed host shows nothing."""
    yield from _known_apart("the host", own.get("host"), other.get("host"))
    for key in _MACHINE:
        if own.get(key) != other.get(key):
            yield key, own.get(key), other.get(key)
    mine, theirs = ([gpu.get("name") for gpu in env.get("gpus") or ()] for env in (own, other))
    if mine != theirs:
        yield "the GPU", ", ".join(map(str, mine)) or "none", ", ".join(map(str, theirs)) or "none"
    used = [env["gpus"] if env.get("gpus") and env.get("device") == "cuda" else [{}] for env in (own, other)]
    yield from _known_apart("the GPU's id", *(gpus[0].get("uuid") for gpus in used))
