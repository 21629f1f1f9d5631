"""`kvbench merge`: merges the shards of a matrix into one run.

The runs must have the same matrix, cells, tasks and identity (which the tasks' keys contain); otherwise the
merge is refused and the difference named. Where several runs measured a task, the record of the lowest shard
is kept. Where the copies differ in something that does not depend on time (status, decision, evidence, bytes,
samples), the worst copy is kept and the manifest of the merged run says so, which no gate passes
(`gate.builtin_checks.merged_differences`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate.precision import judge_precision
from kvbench.matrix.resolve_backend import ASPECTS
from kvbench.records.record import MISMATCH, NOT_SHOWN, OK, Record
from kvbench.records.run import CANARY, MergedFrom, Run, RunDir
from kvbench.run.execute import locked


@dataclass(frozen=True)
class Part:
    name: str  # in messages
    run: Run


@dataclass(frozen=True)
class Merged:
    run: Run  # with the kept records
    differences: tuple[str, ...]  # sentences
    missing: tuple[str, ...]  # titles of tasks without a record


def merge_runs(paths: Sequence[Path], out: Path) -> Merged:
    """Write the merged run to `out`. UsageError where the runs do not match, or `out` holds another run."""
    merged, target = merged_of([_part(path) for path in paths]), RunDir(out)
    taken = out.exists() and any(out.iterdir() if out.is_dir() else [out])
    if taken and not (target.manifest_path.is_file() and target.manifest().merged):
        raise UsageError(f"{out} holds files that are not a merged run; give a new folder with --out.")
    with locked(out):
        for task in merged.run.missing():
            target.record_path(task.key).unlink(missing_ok=True)
        for record in merged.run.records:
            target.write(record)
        target.write_manifest(merged.run.manifest)
    return merged


def merged_of(parts: Sequence[Part]) -> Merged:
    """Merge runs in memory. Raises UsageError."""
    if len(parts) < 2:
        raise UsageError("expected two runs or more, got one: kvbench merge RUN RUN... --out DIR.")
    # The sort is stable: runs that are not shards keep the given order.
    ordered = sorted(parts, key=lambda part: s.shard.number if (s := part.run.manifest.shard) else 0)
    first = ordered[0]
    for part in ordered[1:]:
        if reason := unlike(first, part):
            raise UsageError(f"{part.name} cannot be merged with {first.name}: {reason}")
    records, missing = [], []
    # A run that was merged before has kept one of two copies that differed, and the other is not here.
    earlier = [part.run.manifest.merged for part in ordered]
    differences = [sentence for merged in earlier if merged for sentence in merged.differences]
    for task in first.run.tasks:
        cell = first.run.cell(task.cells[0])
        subject = task.title + f" on {cell.name or 'the only cell'}"
        own = [(part, record) for part in ordered if (record := part.run.record(task.key))]
        if not own:
            missing.append(subject)
            continue
        where, kept = own[0]
        if any(differing(kept, record) for _, record in own):
            # The first of equally bad copies.
            where, kept = max(own, key=lambda one: _badness(cell.spec, one[1]))
        records.append(kept)
        for part, record in own:
            if reason := differing(kept, record):
                differences.append(f"{subject}: {reason} ({where.name}, which is kept, and {part.name}).")
    differences = list(dict.fromkeys(differences))
    of = tuple(
        {
            "shard": asdict(m.shard.shard) if m.shard else None,
            "host": m.environment.get("host"),
            "created_at": m.created_at,
            "command": list(m.command),
        }
        for m in (part.run.manifest for part in ordered)
    )
    manifest = replace(first.run.manifest, shard=None, merged=MergedFrom(of, tuple(differences)))
    return Merged(Run(manifest, tuple(records)), tuple(differences), tuple(missing))


def unlike(first: Part, other: Part) -> str:
    """Why two runs cannot be merged, or ""."""
    for part in (first, other):
        stopped = part.run.manifest.stopped
        if part.run.manifest.until_decided is not None:
            return f"{part.name} was run with --until-decided, which sets sample sizes by its own verdict."
        if stopped and stopped.by == CANARY:
            return (
                f"--canary stopped {part.name}, because the check {stopped.check} did not pass; "
                "fix the cause and run it again first."
            )
    a, b = first.run.manifest, other.run.manifest
    if a.matrix.sha != b.matrix.sha:
        one, two = a.matrix.sha[:12], b.matrix.sha[:12]
        return f"their matrices differ (sha256 {one} and {two}); run the shards of one file."
    if a.matrix.source != b.matrix.source:
        changed = _changed(a.matrix.source, b.matrix.source)
        return f"the matrix was run with other --set options ({changed}); give all shards the same."
    mine, its = (m.environment.get("identity") or {} for m in (a, b))
    for name in dict.fromkeys((*mine, *its)):
        if mine.get(name) != its.get(name):
            return (
                f"their machines differ: {name} is {mine.get(name)} and {its.get(name)}; "
                "run all shards with the same versions on the same kind of machine."
            )
    if [cell.id for cell in a.cells] != [cell.id for cell in b.cells]:
        return "their cells differ; give all shards the same -k and the same matrix."
    if [task.key for task in a.tasks] != [task.key for task in b.tasks]:
        return "the keys of their tasks differ, so the model or the data differs; give all shards the same."
    if a.shard and b.shard and a.shard.shard.of != b.shard.shard.of:
        return f"one is one of {a.shard.shard.of} shards, the other one of {b.shard.shard.of}."
    return ""


def differing(kept: Record, other: Record) -> str:
    """How a second measurement of a task differs from the kept one, or "". Times are not compared."""
    if kept.status != other.status:
        return f"one ended as {kept.status}, the other as {other.status}"
    if kept.status != OK:
        return ""
    for what, of in (
        ("the decisions differ", _decided),
        ("the evidence differs", _shown),
        ("the bytes differ", _bytes),
        ("the samples differ", _samples),
    ):
        # As JSON text, in which a NaN equals itself; what one of them lacks is null.
        one, two = ({k: json.dumps(v, sort_keys=True) for k, v in of(r).items()} for r in (kept, other))
        if names := [k for k in dict.fromkeys((*one, *two)) if one.get(k, "null") != two.get(k, "null")]:
            return f"{what} ({', '.join(names)})"
    return ""


def _decided(record: Record) -> dict[str, Any]:
    keys, decision = ("requested", "resolved", "reason"), record.decision or {}
    said = {name: [decision[name][key] for key in keys] for name in ASPECTS if name in decision}
    return {**said, "partial": record.partial}


def _shown(record: Record) -> dict[str, Any]:
    """The evidence without its facts, which may hold counts that vary."""
    evidence = record.evidence or {}
    whole = {key: evidence.get(key) for key in ("effective", "effective_weights", "precision")}
    return whole | {level["name"]: level["state"] for level in evidence.get("levels", ())}


def _bytes(record: Record) -> dict[str, Any]:
    """Bytes counted from the tensors; what the allocator reports may differ."""
    if record.runner not in ("storage", "transfer"):
        return {}
    facts = {key: value for key, value in record.facts.items() if "bytes" in key and key not in _ALLOCATED}
    return {**facts, **_untimed(record.samples)}


def _samples(record: Record) -> dict[str, Any]:
    """The samples of runners that measure more than times and bytes."""
    return {} if record.runner in ("latency", "storage", "transfer") else dict(_untimed(record.samples))


def _untimed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _untimed(one) for key, one in value.items() if key not in _TIMES}
    return [_untimed(one) for one in value] if isinstance(value, list) else value


_ALLOCATED = ("held_bytes", "workspace_bytes", "device_peak_bytes")
_TIMES = ("seconds", "us", "us_native", "us_reference", "timed_with")


def _badness(spec: Mapping[str, Any], record: Record) -> tuple[bool, bool, int, float]:
    """A sort key of copies, the worst largest: no result, precision fault, worst level of evidence, bytes."""
    if record.status != OK:
        return True, True, 0, 0.0
    levels = [level["state"] for level in (record.evidence or {}).get("levels", ())]
    state = 2 if MISMATCH in levels else int(not levels or any(state in NOT_SHOWN for state in levels))
    try:
        fault = bool(judge_precision(spec, record.decision, record.evidence, record.facts).reason)
        size = 0.0
        if record.runner == "storage":
            size = sum(layer["payload"] + layer["scales"] for layer in record.samples["layers"])
            size += record.facts.get("weights_bytes") or 0
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False, True, 2, 0.0  # damaged: kept, so that the gate reports it
    return False, fault, state, size


def _part(path: Path) -> Part:
    if not path.is_dir():
        raise UsageError(f"{path} is not a run directory; give the folders that `kvbench run --shard` wrote.")
    run = RunDir(path).load()
    share = run.manifest.shard
    return Part(f"{share.shard} ({path})" if share else str(path), run)


def _changed(one: Any, two: Any) -> str:
    """The first key at which two documents differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys((*one, *two)):
            mine, its = one.get(key), two.get(key)
            if mine != its:
                deeper = isinstance(mine, dict) and isinstance(its, dict)
                return f"{key}.{_changed(mine, its)}" if deeper else str(key)
    return "its data"
