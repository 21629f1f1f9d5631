"""What a run would do: cells, decisions with reasons, estimated bytes, reused records."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.errors import NotAvailable, Refused, UsageError
from kvbench.formats.kv import KV_FORMATS, kv_bytes, pages_for
from kvbench.formats.scales import Pairs, origin
from kvbench.gate.coverage import gate_lines
from kvbench.gate.policy import Gate
from kvbench.matrix.cells import Cell, one_model
from kvbench.matrix.load import Matrix
from kvbench.matrix.resolve_backend import ASPECTS, Decision, check_context, request_of, resolve
from kvbench.models.source import check_native, check_stored, config_facts, settled_scales
from kvbench.models.weight_bytes import WeightSizes, weight_sizes
from kvbench.run.execute import Plan
from kvbench.run.task.checks import no_cuda_device

AT_LOAD = "decided at load"  # how the problem of a cell begins whose model is not here yet


@dataclass(frozen=True)
class CellPlan:
    """What would run in one cell."""

    cell: Cell
    decision: Decision | None
    problem: str | None  # why the cell cannot run, or that this is decided at load
    kv_bytes: int | None  # estimated
    weights: WeightSizes | None = None  # by formula, None where only the loaded model tells
    scales: Pairs = ()  # static ones by layer, () where unknown


def plan_cell(cell: Cell) -> CellPlan:
    spec = cell.spec
    try:
        check_stored(spec)
        check_native(spec)
        facts = config_facts(spec)
        decision = resolve(request_of(spec), facts)
        scales = settled_scales(spec, facts)
        check_context(facts, spec["context"], 0)
        weights = weight_sizes(spec, facts, decision.weights.resolved)
    except UsageError as e:
        return CellPlan(cell, None, f"fails at load: {e}", None)
    except NotAvailable as e:
        return CellPlan(cell, None, f"{AT_LOAD}: {e}", None)
    except Refused as e:
        return CellPlan(cell, None, f"refused ({e.reason}): {e}", None)
    # Every sequence's pages at full context, scales included.
    fmt = KV_FORMATS[decision.kv_format.resolved]
    slots = spec["batch"] * pages_for(spec["context"], spec["page_size"]) * spec["page_size"]
    size = sum(kv_bytes(fmt, layer.shape, slots, spec["dtype"]).total for layer in facts.layers)
    return CellPlan(cell, decision, None, size, weights, scales)


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
                **{key: getattr(t, key) for key in ("key", "runner", "variant")},
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
    """The plan for a person. environment: that of `kvbench.machine.host.host()`."""
    model = one_model([p.cell.spec for p in cells])
    counts = f"{len(tasks.todo)} to run, {len(tasks.reused)} reused"
    title = f"{matrix.name}: {len(cells)} cells, {len(matrix.tasks)} tasks ({counts})"
    lines = [title + (f"; model {model}" if model else ""), *device_note(cells, environment), ""]
    lines += [line for p in cells for line in _cell_lines(p)]
    reused = {t.key for t in tasks.reused}
    lines.append("")
    for task in matrix.tasks:
        on = f"{len(task.cells)} cell{'s' if len(task.cells) > 1 else ''}"
        lines.append(f"  {'reuse' if task.key in reused else 'run  '}  {task.key}  {task.title} on {on}")
    # What the reasons of the rejections mean, each sentence once.
    choices = [getattr(p.decision, aspect) for p in cells if p.decision for aspect in ASPECTS]
    reasons = dict.fromkeys(f"  {choice.reason}: {choice.sentence}" for choice in choices if choice.rejected)
    lines += [*([""] if reasons else []), *reasons, ""]
    return "\n".join([*lines, *(f"  {line}" for line in gate_lines(gate, matrix.cells, matrix.tasks))])


def _cell_lines(p: CellPlan) -> Iterator[str]:
    role = "  [baseline]" if p.cell.is_baseline else ""
    size = "KV and weight bytes unknown"
    if p.kv_bytes is not None:
        weights = f"{p.weights.total:,} B of weights" if p.weights else "weight bytes known when it is loaded"
        size = f"{p.kv_bytes:,} B of KV, {weights}"
    yield f"  {p.cell.id}  {p.cell.name or 'the only cell'}{role}: {size}"
    if p.problem:
        yield f"      {p.problem}"
    if (w := p.weights) and w.payload:
        parts = f"{w.payload:,} of codes + {w.scales:,} of scales + {w.native:,} native"
        yield f"      weight bytes: {parts}, ratio to native {w.ratio:.6f}"
    for aspect in ASPECTS if p.decision else ():
        choice = getattr(p.decision, aspect)
        fell = ", fell back" if choice.fell_back else ""
        yield f"      {aspect}: {choice.requested} -> {choice.resolved}{fell} ({choice.reason})"
        yield from (f"        rejected {option}: {reason}" for option, reason in choice.rejected)
    if p.decision and _origin(p)[0] != "none":
        yield f"      scale: {_origin(p)[1]}"


def _origin(p: CellPlan) -> tuple[str, str]:
    """Kind and source of the scales, of the resolved format where that is known."""
    name = p.decision.kv_format.resolved if p.decision else p.cell.spec["kv_format"]
    return origin(KV_FORMATS[name], p.cell.spec["scale"], p.scales)


def device_note(cells: list[CellPlan], environment: Mapping[str, Any]) -> list[str]:
    """One line where cells need a GPU and this machine has none, else nothing."""
    cuda = environment["device"] == "cuda"
    need = sum(no_cuda_device(p.cell.spec, cuda, "") is not None for p in cells)
    if not need:
        return []
    who = "cells need" if need == len(cells) else f"{need} of {len(cells)} cells need"
    return [
        f"note: {who} a CUDA device and this machine has none ({environment['device_reason']}); this is the "
        "plan for a GPU, and a run here is refused: run it on a machine with a GPU, or remove device: cuda."
    ]
