"""Gate policies: YAML to frozen checks, every mistake reported with its place before anything is judged.

    name: int8 release
    allow_partial: true            # default false: a limited or quick run satisfies no check
    allow_fallback: true           # default false: a declared fallback fails the precision check
    evidence: E3                   # default E5: the highest rung of the evidence that must be verified, with all below it
    checks:
      - metric: ppl_delta_pct
        where: {kv_format: int8_sym, variant: wikitext2 stream512}
        within: [-1, 1]            # or at_most: x, at_least: x, equals: x, equals: {value: x, tolerance: t}
        required: false            # default true: not evaluated means exit code 3
        why: the release target

The precision, error and plausibility checks always run. What contradicts the request (a mismatch, of any rung) fails under
every policy; `evidence` says how far what shows nothing (unverified) fails too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS
from kvbench.formats.scales import of_file
from kvbench.matrix import values
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.document import DataPath, Document, Problems, unknown_key
from kvbench.matrix.yaml import read
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.metric import Metric
from kvbench.records.record import RUNGS
from kvbench.text import show, suggestion

GATE_KEYS = ("name", "allow_partial", "allow_fallback", "evidence", "checks")
PREDICATES = ("at_most", "at_least", "equals", "within")
CHECK_KEYS = ("metric", "where", *PREDICATES, "required", "why")
WHERE_KEYS = (*CELL_KEYS, "variant")

_CHOICES: dict[str, Mapping[str, Any]] = {"kv_format": KV_FORMATS, "weights": WEIGHT_FORMATS}


@dataclass(frozen=True)
class Check:
    """`metric` must lie in [low, high] (one of them infinite for a one-sided limit) on the cells that `where` picks.

    limit: the predicate in words; line: where it stands in the policy.
    """

    metric: str
    where: Mapping[str, Any]
    low: float
    high: float
    limit: str
    required: bool = True
    why: str = ""
    line: int | None = None

    @property
    def name(self) -> str:
        chosen = ", ".join(f"{key}={values.text(value)}" for key, value in self.where.items())
        return f"{self.metric} {self.limit}" + (f" where {chosen}" if chosen else "")

    def picks(self, spec: Mapping[str, Any]) -> bool:
        """Whether `where` picks the cell with this spec: equal values, and `true` is not 1; a scale that a file gave, by the
        file's name."""
        return all(_same(spec.get(key), value) for key, value in self.where.items() if key != "variant")


def _same(of_cell: Any, asked: Any) -> bool:
    facts = of_file(of_cell)
    if facts and isinstance(asked, str):
        return bool(facts["file"] == Path(asked).name)
    return bool(of_cell == asked and isinstance(of_cell, bool) == isinstance(asked, bool))


@dataclass(frozen=True)
class Gate:
    name: str
    checks: tuple[Check, ...]
    allow_partial: bool = False
    allow_fallback: bool = False
    evidence: str = RUNGS[-1]
    path: Path | None = None


def load(path: Path | str) -> Gate:
    """Raises UsageError with file, line, column, value, accepted set and nearest match of every mistake."""
    document = read(path)
    problems = Problems(document)
    data = document.data
    if not isinstance(data, dict):
        problems.add((), f"a gate is a mapping of {', '.join(GATE_KEYS)}, not {show(data)}.")
        problems.raise_if_any()
    reader = _Reader(document, problems)
    gate = reader.gate(data, Path(path))
    problems.raise_if_any()
    return gate


class _Reader:
    """Reads on after a mistake, so that all of them are reported; what it returns then is never used."""

    def __init__(self, document: Document, problems: Problems) -> None:
        self.document = document
        self.problems = problems

    def gate(self, data: dict[str, Any], path: Path) -> Gate:
        self.known((), data, "a gate", GATE_KEYS)
        entries = data.get("checks")
        if not isinstance(entries, list):
            self.problems.add(("checks",), "checks must be a list of checks, each with a metric and a limit.")
            entries = []
        return Gate(
            name=self.text((), data, "name", path.stem),
            checks=tuple(self.check(("checks", i), entry) for i, entry in enumerate(entries)),
            allow_partial=self.flag((), data, "allow_partial", False),
            allow_fallback=self.flag((), data, "allow_fallback", False),
            evidence=self.rung(data.get("evidence", RUNGS[-1])),
            path=path,
        )

    def rung(self, value: Any) -> str:
        if value not in RUNGS:
            self.problems.add(
                ("evidence",),
                f"evidence is the highest rung that must be verified, one of {', '.join(RUNGS)}, not {show(value)}.",
            )
        return str(value)

    def check(self, at: DataPath, entry: Any) -> Check:
        if not isinstance(entry, dict):
            self.problems.add(at, f"a check is a mapping of {', '.join(CHECK_KEYS)}, not {show(entry)}.")
            return Check("", {}, 0, 0, "")
        self.known(at, entry, "a check", CHECK_KEYS)
        metric = METRICS.get(entry["metric"]) if isinstance(entry.get("metric"), str) else None
        if metric is None:
            self.no_metric(at, entry)
        low, high, limit = self.limits(at, entry, metric)
        return Check(
            metric=metric.name if metric else "",
            where=self.where(at, entry.get("where", {})),
            low=low,
            high=high,
            limit=limit,
            required=self.flag(at, entry, "required", True),
            why=self.text(at, entry, "why", ""),
            line=self.document.mark(at)[0],
        )

    def no_metric(self, at: DataPath, entry: dict[str, Any]) -> None:
        name = entry.get("metric")
        if name == "precision":
            sentence = (
                "the precision check always runs, comes first and takes no settings; remove this check."
            )
        elif isinstance(name, str):
            sentence = f"{name} is not a metric.{suggestion(name, METRICS)} {_ALL_METRICS}"
        else:
            sentence = f"a check needs a metric; this one has {show(name)}. {_ALL_METRICS}"
        self.problems.add((*at, "metric"), sentence)

    def limits(self, at: DataPath, entry: dict[str, Any], metric: Metric | None) -> tuple[float, float, str]:
        """(low, high, words) of the one predicate that a check has."""
        given = [predicate for predicate in PREDICATES if predicate in entry]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            self.problems.add(
                at, f"a check takes exactly one of {', '.join(PREDICATES)}; this one has {found}."
            )
            return 0, 0, ""
        predicate, path = given[0], (*at, given[0])
        return _LIMITS[predicate](self, path, entry[predicate], metric)

    def at_most(self, at: DataPath, value: Any, metric: Metric | None) -> tuple[float, float, str]:
        limit = self.threshold(at, value, metric)
        return -math.inf, limit, f"at most {limit:g}"

    def at_least(self, at: DataPath, value: Any, metric: Metric | None) -> tuple[float, float, str]:
        limit = self.threshold(at, value, metric)
        return limit, math.inf, f"at least {limit:g}"

    def within(self, at: DataPath, value: Any, metric: Metric | None) -> tuple[float, float, str]:
        if not isinstance(value, list) or len(value) != 2:
            self.problems.add(at, f"within takes two numbers, [low, high], not {show(value)}.")
            return 0, 0, ""
        low, high = (self.threshold((*at, i), v, metric) for i, v in enumerate(value))
        if low > high:
            self.problems.add(at, f"within takes [low, high] with low <= high, not {show(value)}; swap them.")
        return low, high, f"within [{low:g}, {high:g}]"

    def equals(self, at: DataPath, value: Any, metric: Metric | None) -> tuple[float, float, str]:
        if not isinstance(value, dict):
            exact = self.threshold(at, value, metric)
            return exact, exact, f"exactly {exact:.10g}"
        self.known(at, value, "equals", ("value", "tolerance"))
        centre = self.threshold((*at, "value"), value.get("value"), metric)
        tolerance = self.number((*at, "tolerance"), value.get("tolerance"))
        if tolerance < 0:
            self.problems.add((*at, "tolerance"), f"a tolerance is 0 or more, not {tolerance:g}.")
        return centre - tolerance, centre + tolerance, f"{centre:.10g} +- {tolerance:g}"

    def threshold(self, at: DataPath, value: Any, metric: Metric | None) -> float:
        """A finite number that the metric can take at all: no share of 95, no negative milliseconds."""
        number = self.number(at, value)
        low, high = (metric.unit.low, metric.unit.high) if metric else (-math.inf, math.inf)
        if metric and not low <= number <= high:
            range_ = f"{low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
            self.problems.add(
                at, f"{metric.name} ({metric.unit}) is {range_}; a limit of {number:g} decides nothing."
            )
        return number

    def number(self, at: DataPath, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.add(at, f"a limit is a number, not {show(value)}.")
            return 0.0
        endless = (
            isinstance(value, int) and abs(value) > 10**300
        )  # an int of any length; no float may hold it
        if endless or not math.isfinite(value):
            self.problems.add(at, f"a limit is a finite number, not {show(value)}.")
            return 0.0
        return float(value)

    def where(self, at: DataPath, value: Any) -> Mapping[str, Any]:
        path = (*at, "where")
        if not isinstance(value, dict):
            self.problems.add(
                path, f"where is a mapping of cell keys, such as {{kv_format: int8_sym}}, not {show(value)}."
            )
            return {}
        self.known(path, value, "where", WHERE_KEYS)
        for key, chosen in value.items():
            if isinstance(chosen, list | dict):
                sentence = f"{key} takes one value, not {show(chosen)}; write one check for each."
                self.problems.add((*path, key), sentence)
                continue
            if key in _CHOICES and chosen not in list(_CHOICES[key]):
                accepted = _CHOICES[key]
                sentence = f"{key} {show(chosen)} does not exist; accepted: {', '.join(accepted)}.{suggestion(chosen, accepted)}"
                self.problems.add((*path, key), sentence)
                continue
            kind = type(CELL_KEYS.get(key))
            if CELL_KEYS.get(key) is not None and type(chosen) is not kind:
                self.problems.add(
                    (*path, key), f"{key} is {_KINDS[kind]} in every cell, never {show(chosen)}."
                )
        return value

    def known(self, at: DataPath, data: dict[str, Any], section: str, accepted: tuple[str, ...]) -> None:
        for key in data:
            if key == "precision":
                sentence = (
                    "precision is no key: the precision check always runs, comes first and takes no settings."
                )
                self.problems.add((*at, key), sentence, key=True)
            elif key not in accepted:
                self.problems.add((*at, key), unknown_key(key, section, accepted), key=True)

    def text(self, at: DataPath, data: dict[str, Any], key: str, default: str) -> str:
        value = data.get(key, default)
        if not isinstance(value, str):
            self.problems.add((*at, key), f"{key} is a text, not {show(value)}; put it in quotes.")
        return str(value)

    def flag(self, at: DataPath, data: dict[str, Any], key: str, default: bool) -> bool:
        value = data.get(key, default)
        if not isinstance(value, bool):
            self.problems.add((*at, key), f"{key} is true or false, not {show(value)}.")
        return bool(value)


_ALL_METRICS = f"kvbench schema gate has all {len(METRICS)} with what they mean."
_KINDS = {int: "a whole number", str: "a text", bool: "true or false"}

_LIMITS: dict[str, Callable[[_Reader, DataPath, Any, Metric | None], tuple[float, float, str]]] = {
    "at_most": _Reader.at_most,
    "at_least": _Reader.at_least,
    "equals": _Reader.equals,
    "within": _Reader.within,
}
