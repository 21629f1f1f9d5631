"""Measures one task: runs its runner, takes the evidence, and turns whatever happens into a record."""

import gc
import importlib
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch

from kvbench.errors import KvbenchError, NotAvailable, Refused
from kvbench.evidence.examine import Found
from kvbench.evidence.native_arm import native_arm, worst_of
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat
from kvbench.formats.scales import Pairs, origin
from kvbench.matrix.cells import Task
from kvbench.matrix.resolve_backend import Decision
from kvbench.matrix.runners import RUNNERS
from kvbench.models.source import settled_scales, uses_random_weights
from kvbench.records.record import ERROR, NOT_EVALUATED, OK, REFUSED, Evidence, Record
from kvbench.run.task.prepare import Prepared, Progress, Session, prepare
from kvbench.runners.context import Measurement


def execute(task: Task, session: Session, baseline: Record | None, progress: Progress) -> Record:
    """Runs `task` and returns its record; only an interrupt leaves this function as an exception."""
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    decision: Decision | None = None
    evidence: Evidence | None = None
    measured = Measurement({}, {})
    status = OK
    error: dict[str, Any] | None = None
    try:
        decision, measured, evidence = _measure(task, session, baseline, progress)
    except Refused as e:
        status, error = REFUSED, {"reason": e.reason, "message": str(e)}
    except NotAvailable as e:
        status, error = NOT_EVALUATED, {"reason": "not_available", "message": str(e)}
    except Exception as e:  # any fault of one task must become its record, so that the others go on
        tail = traceback.format_exc().splitlines()[-12:]
        status, error = ERROR, {"type": type(e).__name__, "message": str(e) or type(e).__name__, "tail": tail}
    finally:
        gc.collect()
    reasons = [measured.partial] if measured.partial else []
    if uses_random_weights(task.spec) and RUNNERS[task.runner].quality:
        reasons.append("random weights: plumbing only")
    now = {"threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]}
    return Record(
        key=task.key,
        runner=task.runner,
        protocol=RUNNERS[task.runner].protocol,
        status=status,
        spec=dict(task.spec),
        options=dict(task.options),
        decision=asdict(decision) if decision else None,
        evidence=asdict(evidence) if evidence else None,
        samples=measured.samples,
        facts=measured.facts,
        environment={**session.environment, **now},
        partial="; ".join(reasons) or None,
        error=error,
        started_at=started,
        seconds=round(time.perf_counter() - clock, 3),
    )


def _measure(
    task: Task, session: Session, baseline: Record | None, progress: Progress
) -> tuple[Decision, Measurement, Evidence]:
    ready = prepare(task, session, baseline, progress)
    runner = importlib.import_module(f"kvbench.runners.{task.runner}")
    measured: Measurement = runner.run(ready.context)
    decision, spec, model = ready.own.decision, task.spec, ready.context.model
    facts = {**measured.facts, **session.examiner.clipped(ready.own.engines)}
    fmt = KV_FORMATS[decision.kv_format.resolved]
    if warnings := model.warnings(spec["scale"] if fmt.scale_kind == "static" else None):
        facts["weight_warnings"] = list(warnings)
    evidence, found = _evidence(ready, session, RUNNERS[task.runner].reads)
    facts |= scale_facts(fmt, spec, ready.scales, found)
    return decision, replace(measured, facts=facts), evidence


def _evidence(ready: Prepared, session: Session, reads_expected: bool) -> Found:
    """Evidence of the worst measured engine with what the other engines prove, and its scales."""
    own, beside = ready.own, (ready.native, ready.emulator)
    for engine in (e for arm in (own, *beside) for e in arm.engines):
        engine.check_health()
    tokens = own.computed_tokens, ready.native.computed_tokens
    if not own.engines:
        if reads_expected:
            raise KvbenchError("The runner measured without an engine, so its numbers cannot be this cell's.")
        own.make(1, own.spec["page_size"])
    examined = session.examiner.examine(own.engines, own.decision, own.spec, reads_expected)
    worst, scales = worst_of(examined, (own.decision.kv_format.resolved, own.decision.weights.resolved))
    # The native arm must really be native, even if `native_of` is wrong: a quantized baseline is a fault.
    expected = ("native", "native"), ("native", own.decision.weights.resolved)
    shown = [
        (evidence, formats)
        for arm, formats in zip(beside, expected, strict=True)
        for evidence, _ in session.examiner.examine(arm.engines, arm.decision, arm.spec, reads_expected)
    ]
    if not shown:
        return worst, scales
    return replace(worst, levels=(*worst.levels, native_arm(shown, *tokens))), scales


def evidence_of(
    engine: Any, decision: Decision, spec: Mapping[str, Any], session: Session
) -> tuple[Evidence, dict[str, Any]]:
    """Evidence of one engine outside a matrix, whose work has ended, and its scales as in a record's facts.

    decision, spec: what the engine was to be. Raises KvbenchError for values that the format cannot hold.
    """
    engine.check_health()
    ((evidence, found),) = session.examiner.examine([engine], decision, spec, reads_expected=True)
    fmt = KV_FORMATS[decision.kv_format.resolved]
    return evidence, scale_facts(fmt, spec, settled_scales(spec, engine.model.facts), found)


def scale_facts(
    fmt: KVFormat, spec: Mapping[str, Any], pairs: Pairs, found: list[dict[str, Any]]
) -> dict[str, Any]:
    """Where the scales of the format that ran came from, in words and layer by layer."""
    if fmt.scale_kind == "none":
        return {}
    kind, source = origin(fmt, spec["scale"], pairs)
    if any(row[f"{side}_source"] is None for row in found for side in SIDES):
        kind, source = "unknown", f"unknown: not what was asked for, which is {source}"
    return {"scale_kind": kind, "scale_source": source, "scales": found}
