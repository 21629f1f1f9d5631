"""What a matrix will do, without doing it: cells, decisions with reasons, estimated bytes, reused records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.errors import NotAvailable, Refused, UsageError
from kvbench.formats.kv import KV_FORMATS, kv_bytes, pages_for
from kvbench.formats.scales import Pairs, origin
from kvbench.gate.coverage import gate_lines
from kvbench.gate.policy import Gate
from kvbench.matrix.cells import Cell, one_model
from kvbench.matrix.load import Matrix
from kvbench.matrix.resolve import ASPECTS, Decision, check_context, request_of, resolve
from kvbench.models.attention_facts import ModelFacts
from kvbench.models.source import check_native, check_stored, config_facts, settled_scales
from kvbench.models.weight_bytes import WeightSizes, weight_sizes
from kvbench.run.execute import Plan
from kvbench.run.task.checks import no_cuda_device


@dataclass(frozen=True)
class CellPlan:
    """decision None and `problem` say why a cell cannot run, or that it is decided at load. kv_bytes: estimated; weights: by
    formula, None where only the loaded model tells; scales: static ones, a layer each, () where they are not known here."""

    cell: Cell
    decision: Decision | None
    problem: str | None
    kv_bytes: int | None
    weights: WeightSizes | None = None
    scales: Pairs = ()


def plan_cell(cell: Cell) -> CellPlan:
    spec = cell.spec
    request = request_of(spec)
    try:
        check_stored(spec)
        check_native(spec)
        facts = config_facts(spec)
        decision = resolve(request, facts)
        scales = settled_scales(spec, facts)
        check_context(facts, spec["context"], 0)
        weights = weight_sizes(spec, facts, decision.weights.resolved)
    except UsageError as e:
        return CellPlan(cell, None, f"fails at load: {e}", None)
    except NotAvailable as e:
        return CellPlan(cell, None, f"decided at load: {e}", None)
    except Refused as e:
        return CellPlan(cell, None, f"refused ({e.reason}): {e}", None)
    return CellPlan(cell, decision, None, estimate(spec, facts, decision), weights, scales)


def estimate(spec: Mapping[str, Any], facts: ModelFacts, decision: Decision) -> int:
    """KV bytes of a cell: every sequence's pages at full context, scales included."""
    fmt = KV_FORMATS[decision.kv_format.resolved]
    slots = spec["batch"] * pages_for(spec["context"], spec["page_size"]) * spec["page_size"]
    return sum(kv_bytes(fmt, layer.shape, slots, spec["dtype"]).total for layer in facts.layers)


def plan_json(matrix: Matrix, cells: list[CellPlan], tasks: Plan, gate: Gate | None = None) -> dict[str, Any]:
    reused = {t.key for t in tasks.reused}
    return {
        "name": matrix.name,
        "cells": [
            {
                "id": p.cell.id,
                "name": p.cell.name,
                "spec": dict(p.cell.spec),
                "baseline": p.cell.baseline,
                "decision": asdict(p.decision) if p.decision else None,
                "scale": dict(zip(("kind", "source"), _origin(p), strict=True)),
                "problem": p.problem,
                "kv_bytes": p.kv_bytes,
                "weight_bytes": {**asdict(p.weights), "total": p.weights.total} if p.weights else None,
            }
            for p in cells
        ],
        "tasks": [
            {
                "key": t.key,
                "runner": t.runner,
                "variant": t.variant,
                "cells": list(t.cells),
                "action": "reuse" if t.key in reused else "run",
            }
            for t in matrix.tasks
        ],
        "gate": gate_lines(gate, matrix.cells, matrix.tasks),
    }


def plan_text(
    matrix: Matrix,
    cells: list[CellPlan],
    tasks: Plan,
    environment: Mapping[str, Any],
    gate: Gate | None = None,
) -> str:
    """The plan for a person. environment: that of `kvbench.machine.host.host()`, for the device that is here."""
    model = one_model([p.cell.spec for p in cells])
    lines = [f"{matrix.name}: {len(cells)} cells, {len(matrix.tasks)} tasks "
             f"({len(tasks.todo)} to run, {len(tasks.reused)} reused){f'; model {model}' if model else ''}", *device_note(cells, environment), ""]  # fmt: skip
    for p in cells:
        role = "  [baseline]" if p.cell.is_baseline else ""
        lines.append(f"  {p.cell.id}  {p.cell.name or 'the only cell'}{role}: {_size(p)}")
        if p.problem:
            lines.append(f"      {p.problem}")
        if (w := p.weights) and w.payload:
            parts = f"{w.payload:,} of codes + {w.scales:,} of scales + {w.native:,} native"
            lines.append(f"      weight bytes: {parts}, ratio to native {w.ratio:.6f}")
        if p.decision:
            for aspect in ASPECTS:
                choice = getattr(p.decision, aspect)
                fell = ", fell back" if choice.fell_back else ""
                lines.append(
                    f"      {aspect}: {choice.requested} -> {choice.resolved}{fell} ({choice.reason})"
                )
                lines.extend(f"        rejected {option}: {reason}" for option, reason in choice.rejected)
            if _origin(p)[0] != "none":
                lines.append(f"      scale: {_origin(p)[1]}")
    lines.append("")
    reused = {t.key for t in tasks.reused}
    for t in matrix.tasks:
        what = f"{t.runner} {t.variant}".strip()
        action = "reuse" if t.key in reused else "run  "
        lines.append(f"  {action}  {t.key}  {what} on {len(t.cells)} cell{'s' if len(t.cells) > 1 else ''}")
    foreseen = [f"  {line}" for line in gate_lines(gate, matrix.cells, matrix.tasks)]
    return "\n".join([*lines, *_reasons(cells), "", *foreseen])


def _origin(p: CellPlan) -> tuple[str, str]:
    """Kind and source of the scales, of the format that is resolved where that is known."""
    name = p.decision.kv_format.resolved if p.decision else p.cell.spec["kv_format"]
    return origin(KV_FORMATS[name], p.cell.spec["scale"], p.scales)


def _size(p: CellPlan) -> str:
    if p.kv_bytes is None:
        return "KV and weight bytes unknown"
    weights = f"{p.weights.total:,} B of weights" if p.weights else "weight bytes known once it is loaded"
    return f"{p.kv_bytes:,} B of KV, {weights}"


def device_note(cells: list[CellPlan], environment: Mapping[str, Any]) -> list[str]:
    cuda = environment["device"] == "cuda"
    need = sum(no_cuda_device(p.cell.spec, cuda, "") is not None for p in cells)
    if not need:
        return []
    who = "cells need" if need == len(cells) else f"{need} of {len(cells)} cells need"
    return [f"note: {who} a CUDA device and this machine has none ({environment['device_reason']}); planned as for a "
            "GPU, a run here is refused: run it on a machine with one, or leave device: cuda out."]  # fmt: skip


def _reasons(cells: list[CellPlan]) -> list[str]:
    """What the reason words of the rejections mean, each sentence once."""
    choices = [getattr(p.decision, aspect) for p in cells if p.decision for aspect in ASPECTS]
    said = dict.fromkeys(f"  {choice.reason}: {choice.sentence}" for choice in choices if choice.rejected)
    return ["", *said] if said else []
