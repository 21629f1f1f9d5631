"""Gate policies: a YAML file becomes frozen checks, and every mistake is reported with its place.

    name: int8 release
    allow_partial: true            # default false: a limited run satisfies no check
    allow_fallback: true           # default false: a declared fallback fails the precision check
    evidence: E3                   # default E5: all evidence levels up to this one must be verified
    checks:
      - metric: ppl_delta_pct
        where: {kv_format: int8_sym, variant: wikitext2 stream512}
        within: [-1, 1]            # or at_most: x, at_least: x, equals: x, equals: {value: x, tolerance: t}
        required: false            # default true: not evaluated means exit code 3
        why: the release target

The precision, error and plausibility checks always run. Evidence that contradicts the request (a mismatch, of
any level) fails under every policy; `evidence` says up to which level unverified evidence fails too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.formats.scales import of_file
from kvbench.matrix import cells
from kvbench.matrix.document import DataPath, Problems
from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.matrix.rules import INVALID, Either, Items, Keys, Option, check
from kvbench.matrix.schema import Schema, document, schema_of
from kvbench.matrix.yaml import read
from kvbench.metrics.collect import METRICS
from kvbench.records.record import RUNGS

PREDICATES = ("at_most", "at_least", "equals", "within")
_ALWAYS = "the precision check always runs, comes first and takes no settings"
_NO_KEY = {"precision": f"precision is not a key: {_ALWAYS}."}
_NUMBER = Option("float", None, "")
_TOLERANCE = {"value": _NUMBER, "tolerance": Option("float", None, "", minimum=0.0)}
_EQUALS = Keys("equals", _TOLERANCE, required=tuple(_TOLERANCE), example="{value: 0.5, tolerance: 0.01}")

_VARIANT = Option("str", None, 'corpus or question set with its protocol: "wikitext2 stream512"')
WHERE = Keys(
    "where",
    {**CELL_OPTIONS, "variant": _VARIANT},
    "the cells that the check applies to: those that agree with every key; all cells without it",
    example="{kv_format: int8_sym}",
    hints=_NO_KEY,
    list_hint="write one check for each value",
)
CHECK = Keys(
    "a check",
    {
        "metric": Option(
            "str",
            None,
            "what is limited",
            tuple(METRICS),
            expects="the name of a metric (docs/reference/metrics.md lists them)",
            meanings={m.name: f"{m.definition} ({m.unit})" for m in METRICS.values()},
            hints={"precision": f"remove this check: {_ALWAYS}"},
        ),
        "where": WHERE,
        "at_most": Option("float", None, "passes when the whole interval is at or below it"),
        "at_least": Option("float", None, "passes when the whole interval is at or above it"),
        "equals": Either((_NUMBER, _EQUALS), "a value, or {value:, tolerance:}"),
        "within": Items(_NUMBER, "[low, high]", least=2, most=2, example="[low, high]"),
        "required": Option("bool", True, "false: not evaluated does not end in exit code 3"),
        "why": Option("str", None, "where the limit comes from; printed with the outcome", pattern=""),
    },
    required=("metric",),
    one_of=PREDICATES,
    example="{metric: NAME, at_most: 1}",
    hints=_NO_KEY,
)
GATE = Keys(
    "a gate",
    {
        "name": Option("str", None, "the gate's name; by default the file's", pattern=""),
        "allow_partial": Option("bool", False, "true: limited or quick results may satisfy checks"),
        "allow_fallback": Option("bool", False, "true: a declared fallback may pass the precision check"),
        "evidence": Option("str", RUNGS[-1], "evidence levels up to this one must be verified", tuple(RUNGS)),
        "checks": Items(CHECK, "limits on metrics", example="[{metric: NAME, at_most: 1}]"),
    },
    required=("checks",),
    example="{checks: [...]}",
    hints=_NO_KEY,
)


def gate_schema() -> Schema:
    """The JSON Schema of `gates/*.yaml`."""
    return document("kvbench gate", schema_of(GATE))


@dataclass(frozen=True)
class Check:
    """`metric` must lie in [low, high] (one of them infinite for a one-sided limit) on the cells that `where`
    selects. limit: the predicate in words; line: its line in the policy."""

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
        chosen = ", ".join(f"{key}={cells.text(value)}" for key, value in self.where.items())
        return f"{self.metric} {self.limit}" + (f" where {chosen}" if chosen else "")

    def picks(self, spec: Mapping[str, Any]) -> bool:
        """Whether `where` selects the cell with this spec: `true` is not 1, and a scale that was read from a
        file is equal to the file's name."""
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
    """The policy in a file. Raises ConfigError with every mistake."""
    source = read(path)
    problems = Problems(source)
    data = check(GATE, source.data, problems)
    _check_limits(data, problems)
    problems.raise_if_any()
    checks = tuple(_check_of(entry, source.mark(("checks", i))[0]) for i, entry in enumerate(data["checks"]))
    given = {"name": Path(path).stem, **data, "checks": checks}
    return Gate(**given, path=Path(path))


def _check_of(entry: Mapping[str, Any], line: int) -> Check:
    (predicate,) = (key for key in PREDICATES if key in entry)
    low, high, words = _limit(predicate, entry[predicate])
    more = {key: entry[key] for key in ("required", "why") if key in entry}
    return Check(entry["metric"], entry.get("where", {}), low, high, words, line=line, **more)


def _limit(predicate: str, value: Any) -> tuple[float, float, str]:
    """(low, high, words) of an accepted predicate."""
    match predicate, value:
        case "at_most", _:
            return -math.inf, value, f"at most {value:g}"
        case "at_least", _:
            return value, math.inf, f"at least {value:g}"
        case "within", (low, high):
            return low, high, f"within [{low:g}, {high:g}]"
        case "equals", {"value": centre, "tolerance": tolerance}:
            return centre - tolerance, centre + tolerance, f"{centre:.10g} +- {tolerance:g}"
        case _:
            return value, value, f"exactly {value:.10g}"


def _check_limits(data: Any, problems: Problems) -> None:
    """Report limits outside the unit's domain (a share of 95, negative milliseconds), or with low > high."""
    checks = data.get("checks") if isinstance(data, dict) else None
    for i, entry in enumerate(checks if isinstance(checks, list) else ()):
        if not isinstance(entry, dict):
            continue
        metric = METRICS.get(entry.get("metric", ""))
        low, high = (metric.unit.low, metric.unit.high) if metric else (-math.inf, math.inf)
        for path, number in _numbers(("checks", i), entry):
            if metric and not low <= number <= high:
                domain = f"{low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
                always = f"{metric.name} ({metric.unit}) is always {domain}"
                problems.add(path, f"{always}; a limit of {number:g} has no effect.", "out_of_domain")
        match entry.get("within"):
            case (float(low), float(high)) if low > high:
                sentence = f"within: expected [low, high], got [{low:g}, {high:g}]; swap them."
                problems.add(("checks", i, "within"), sentence, "conflict")


def _numbers(at: DataPath, entry: Mapping[str, Any]) -> Iterator[tuple[DataPath, float]]:
    """The accepted limits of a check, with their places; a tolerance is not a limit."""
    for predicate in PREDICATES:
        path = (*at, predicate)
        match entry.get(predicate):
            case float(number) | {"value": float(number)}:
                yield path, number
            case list(numbers):
                yield from (((*path, i), number) for i, number in enumerate(numbers) if number is not INVALID)
