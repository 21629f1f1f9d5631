"""Records: what one task measured, and the evidence of what really ran. Immutable once written.

Statistics are never stored: they are computed on reading (`kvbench.metrics.collect.derive`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.matrix.resolve_backend import ASPECTS

SCHEMA_VERSION = 3  # of records and manifests

# What can be said of one piece of evidence, and of a record as a whole (the worst level counts).
VERIFIED, MISMATCH, UNVERIFIED, NOT_APPLICABLE = "verified", "mismatch", "unverified", "not_applicable"
NOT_AVAILABLE = "not_available"  # the engine cannot give this level; it counts as unverified
NOT_SHOWN = (UNVERIFIED, NOT_AVAILABLE)
STATES = (VERIFIED, MISMATCH, UNVERIFIED, NOT_APPLICABLE, NOT_AVAILABLE)

# The levels of evidence, in the order in which they are shown; a record of a measured cell has all of them.
RUNGS = ("E1", "E2", "E3", "E4", "E5")
_E3 = ("E3", "E3-layers", "E3-pages", "E3-prefill", "E3-reads")
LEVELS = ("E1", "E2", *_E3, "E4", "E5", *(f"{name}-weights" for name in RUNGS))


def rung(level: str) -> str:
    """The rung of the ladder that a level stands on: E3 of "E3-layers"."""
    return level.split("-")[0]


# How a task ended. `refused`: the cell may not run as asked; `not_evaluated`: what it needs is not here.
OK, ERROR, REFUSED, NOT_EVALUATED = _STATUSES = ("ok", "error", "refused", "not_evaluated")


@dataclass(frozen=True)
class Level:
    """One level of evidence. name: one of `LEVELS`, or "native-arm". sentence: what was lost and where."""

    name: str
    state: str
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """What the live tensors and the read path prove, set against what was resolved.

    effective, effective_weights: the KV and the weight format that the evidence shows ("int8_sym", "native",
    "mixed", "unknown"). precision: {"storage": dtype, "transfer": dtype or "not measured", "execution":
    dtype} of the cache, {"weights": dtype, "gemm": paths of the products} of the weights. reads: {"tokens":
    tokens read from pages, "quantized_tokens": of them from quantized payload, "calls": n}.
    """

    effective: str
    effective_weights: str
    levels: tuple[Level, ...]
    precision: Mapping[str, str]
    reads: Mapping[str, int]

    @property
    def state(self) -> str:
        states = {level.state for level in self.levels} - {NOT_APPLICABLE}
        if MISMATCH in states:
            return MISMATCH
        return VERIFIED if states == {VERIFIED} else UNVERIFIED


@dataclass(frozen=True)
class Record:
    """One task's outcome. `kvbench.records.schema` describes each field.

    decision, evidence: `Decision` and `Evidence` as dicts, or None. error: {"type", "message", "tail"} for
    status error; {"reason", "message"} for refused and not_evaluated.
    """

    key: str
    runner: str
    protocol: int
    status: str
    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    decision: Mapping[str, Any] | None
    evidence: Mapping[str, Any] | None
    samples: Mapping[str, Any]
    facts: Mapping[str, Any]
    environment: Mapping[str, Any]
    partial: str | None
    error: Mapping[str, Any] | None
    started_at: str
    seconds: float
    schema: int = SCHEMA_VERSION


def record_from_dict(data: Mapping[str, Any], path: Path | str = "record") -> Record:
    """A record from the data of its file.

    Raises UsageError for another schema version, a missing or unknown key, or a part of the wrong kind.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no record; delete that file and run the matrix again.")
    if fault := schema_fault(data):
        raise UsageError(f"{path} {fault}. Run the matrix again with this version.")
    if wrong := sorted({f.name for f in fields(Record)}.symmetric_difference(data)):
        raise UsageError(f"{path} does not hold a whole record: check the keys {', '.join(wrong)}.")
    bad = [name for name, kinds in _KINDS.items() if not isinstance(data[name], kinds)]
    checks = ("status", _STATUSES.__contains__), ("decision", _is_decision), ("evidence", _is_evidence)
    bad = bad or [name for name, sound in checks if data[name] is not None and not sound(data[name])]
    if bad:
        raise UsageError(
            f"{path} is damaged: {', '.join(bad)} cannot be what kvbench wrote; "
            "delete that file and run the matrix again."
        )
    return Record(**data)


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("key", "runner", "status", "started_at"), (str,)),
    **dict.fromkeys(("spec", "options", "samples", "facts", "environment"), (dict,)),
    **dict.fromkeys(("decision", "evidence", "error"), (dict, type(None))),
    "protocol": (int,),
    "partial": (str, type(None)),
    "seconds": (int, float),
}


def _is_decision(data: Mapping[str, Any]) -> bool:
    choices = [data.get(aspect) for aspect in ASPECTS]
    return all(
        isinstance(c, dict) and all(isinstance(c.get(k), str) for k in ("requested", "resolved", "reason"))
        for c in choices
    )


def _is_evidence(data: Mapping[str, Any]) -> bool:
    levels = data.get("levels")
    return (
        set(data) == {f.name for f in fields(Evidence)}
        and all(isinstance(data[name], str) for name in ("effective", "effective_weights"))
        and all(isinstance(data[name], dict) for name in ("precision", "reads"))
        and isinstance(levels, list)
        and all(
            isinstance(level, dict)
            and {"name", "state", "sentence"} <= set(level) <= {f.name for f in fields(Level)}
            and level["state"] in STATES
            for level in levels
        )
    )


def schema_fault(data: Mapping[str, Any]) -> str:
    """What is wrong with the schema version of a record or manifest, to be read after its path, or ""."""
    version = data.get("schema")
    if version == SCHEMA_VERSION:
        return ""
    newer = type(version) is int and version > SCHEMA_VERSION
    hint = "; a newer kvbench wrote it, install that version" if newer else ""
    return f"has schema {version!r}, and this kvbench reads schema {SCHEMA_VERSION} only{hint}"
