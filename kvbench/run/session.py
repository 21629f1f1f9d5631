"""Running one task: decide, load, measure, take the evidence, and turn whatever happens into a record."""

from __future__ import annotations

import gc
import importlib
import os
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.errors import KvbenchError, NotAvailable, Refused, UsageError
from kvbench.evidence.examine import examine
from kvbench.evidence.layer_order import Make, probe_layers
from kvbench.evidence.native_arm import native_arm, standing
from kvbench.evidence.page_order import probe_pages
from kvbench.evidence.products import Products, rows_of
from kvbench.evidence.read_path import probe_prefill, probe_values
from kvbench.evidence.scale_sources import live_scales, provenance
from kvbench.evidence.weight_reads import probe_after, probe_weights, with_after
from kvbench.files import content_hash
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat
from kvbench.formats.scales import Pairs, origin
from kvbench.matrix.cells import Task
from kvbench.matrix.expand import baseline_spec
from kvbench.matrix.resolve import AUTO, Choice, Decision, check_context, request_of, resolve
from kvbench.matrix.runners import RUNNERS
from kvbench.models.source import check_native, config_facts, settled_scales, uses_random_weights
from kvbench.records.record import ERROR, NOT_EVALUATED, OK, REFUSED, Evidence, Level, Record
from kvbench.runners.context import Context, Measurement

Progress = Callable[[int, int, str], None]

# Spec keys that make no other engine: the probes are shared by cells that differ in these only.
_NOT_ENGINE = ("batch", "context", "fallback", "plumbing")


@dataclass
class Session:
    """What the tasks of one run share: loaded models (one, and its native one where both run) and the probes taken."""

    data_dir: Path | None
    environment: Mapping[str, Any]
    _models: dict[str, LoadedModel] = field(default_factory=dict)
    _probes: dict[str, tuple[Level, ...]] = field(default_factory=dict)
    _weights: dict[str, tuple[weakref.ref[Any], tuple[Level, ...]]] = field(default_factory=dict)

    def model(
        self, spec: Mapping[str, Any], beside: Mapping[str, Any] | None = None, alone: bool = False
    ) -> LoadedModel:
        """The cell's model. beside: the spec of a model that stays loaded; alone: no other one stays, as bytes are
        counted.
        """
        key = _model_key(spec)
        if key not in self._models or alone:
            keep = {key} if beside is None else {key, _model_key(beside)}
            self._models = {k: m for k, m in self._models.items() if k in keep}
            gc.collect()
        if key not in self._models:
            self._models[key] = load_model(spec, spec["device"], spec["dtype"])
        return self._models[key]

    def probes(
        self, model: LoadedModel, decision: Decision, spec: Mapping[str, Any], ran: Products
    ) -> tuple[Level, ...]:
        """Of the cell's configuration, taken once; of FP8 weights also what the run that made the products `ran` left behind."""
        key = content_hash({k: v for k, v in spec.items() if k not in _NOT_ENGINE})

        def make(sequences: int, tokens: int) -> Engine:
            return Engine(model, decision, spec, sequences=sequences, tokens=tokens)

        if key not in self._probes:
            self._probes[key] = (
                probe_layers(make, len(model.layers), spec["page_size"]),
                probe_pages(make, spec["page_size"]),
                probe_prefill(make, len(model.layers)),
                probe_values(make, spec["page_size"]),
            )
        return self._probes[key] + self._weight_probes(model, decision, spec, ran, make)

    def _weight_probes(
        self,
        model: LoadedModel,
        decision: Decision,
        spec: Mapping[str, Any],
        ran: Products,
        make: Make | None = None,
    ) -> tuple[Level, ...]:
        """Of the very modules that are loaded now: a model that was loaded again is probed again."""
        key = content_hash([_model_key(spec), decision.gemm.resolved])
        of, levels = self._weights.get(key, (None, ()))
        new = of is None or of() is not model.model
        if new:
            levels = probe_weights(model, decision, make)
            self._weights[key] = weakref.ref(model.model), levels
        if decision.weights.resolved == "native":
            return levels
        after = probe_after(model, decision, rows_of(ran), None if new else make)
        return tuple(with_after(first, now) for first, now in zip(levels, after, strict=True))


def _model_key(spec: Mapping[str, Any]) -> str:
    keys = ("model", "model_weights", "model_revision", "trust_remote_code", "weights", "device", "dtype")
    return content_hash({k: spec[k] for k in keys})


def execute(task: Task, session: Session, baseline: Record | None, progress: Progress) -> Record:
    """Run `task` and return its record; only an interrupt leaves this function as an exception."""
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
    environment = {
        **session.environment,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
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
        environment=environment,
        partial=_partial(task, measured),
        error=error,
        started_at=started,
        seconds=round(time.perf_counter() - clock, 3),
    )


def _partial(task: Task, measured: Measurement) -> str | None:
    reasons = [measured.partial] if measured.partial else []
    if uses_random_weights(task.spec) and RUNNERS[task.runner].quality:
        reasons.append("random weights: plumbing only")
    return "; ".join(reasons) or None


def require_device(spec: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Raises Refused for cuda on a machine without it."""
    if spec["device"] == "cuda" and not torch.cuda.is_available():
        raise Refused(
            "no_cuda_device",
            f"device cuda was asked for, and this machine has none: {environment.get('device_reason')}. Use "
            "device: auto, or run on a machine with a GPU.",
        )


def _measure(
    task: Task, session: Session, baseline: Record | None, progress: Progress
) -> tuple[Decision, Measurement, Evidence]:
    spec, decl = task.spec, RUNNERS[task.runner]
    check_native(spec)
    if decl.quality and uses_random_weights(spec) and not spec["plumbing"]:
        raise Refused(
            "random_weights",
            f"{task.runner} measures quality and the weights are random; use a checkpoint, or `plumbing: true` "
            "for a run that only exercises the path and is marked partial.",
        )
    if decl.quality and task.baseline is not None and (baseline is None or baseline.status != OK):
        why = (
            "has not run"
            if baseline is None
            else f"ended as {baseline.status}: {str((baseline.error or {}).get('message')).rstrip('.')}"
        )
        raise NotAvailable(f"{task.runner} compares with its native baseline, which {why}.")
    require_device(spec, session.environment)
    new_tokens = task.options.get("new_tokens", 0)
    if "context" not in decl.ignores:
        _check_before_loading(spec, new_tokens)
    model = session.model(spec, alone=not decl.beside)
    decision = resolve(request_of(spec), model.facts)
    scales = settled_scales(spec, model.facts)
    if "context" not in decl.ignores:
        check_context(model.facts, spec["context"], new_tokens)
    engines: list[Engine] = []
    natives: list[Engine] = []

    emulators: list[Engine] = []
    native_spec = baseline_spec(spec)

    def make(sequences: int = 1, tokens: int = spec["prefill_chunk"]) -> Engine:
        engines.append(Engine(model, decision, spec, sequences=sequences, tokens=tokens))
        return engines[-1]

    def make_native(sequences: int = 1, tokens: int = spec["prefill_chunk"]) -> Engine:
        beside = session.model(native_spec, beside=spec)
        _check_same_model(model, beside)
        choice = native_of(decision)
        natives.append(Engine(beside, choice, native_spec, sequences=sequences, tokens=tokens))
        return natives[-1]

    def make_emulator(sequences: int = 1, tokens: int = spec["prefill_chunk"]) -> Engine:
        choice, own = emulator_of(decision, spec)
        emulators.append(Engine(model, choice, own, sequences=sequences, tokens=tokens))
        return emulators[-1]

    context = Context(
        spec=spec,
        options=task.options,
        variant=task.variant,
        model=model,
        engine=make,
        native=make_native,
        emulator=make_emulator,
        baseline=baseline,
        data_dir=session.data_dir,
        progress=progress,
    )
    runner = importlib.import_module(f"kvbench.runners.{task.runner}")
    measured = _with_clips(runner.run(context), engines)
    fmt = KV_FORMATS[decision.kv_format.resolved]
    facts = dict(measured.facts)
    if warnings := model.warnings(spec["scale"] if fmt.scale_kind == "static" else None):
        facts["weight_warnings"] = list(warnings)
    evidence, found = _evidence(context, engines, natives, emulators, decision, session, decl.reads)
    facts |= _scale_facts(fmt, spec, scales, found)
    return decision, replace(measured, facts=facts), evidence


def _check_same_model(model: LoadedModel, native: LoadedModel) -> None:
    """Raises Refused when the model of the native cells is another one: what would be compared is not the weights' format."""
    for what, own, other in (
        ("layers", model.facts.layers, native.facts.layers),
        ("model_type", model.facts.model_type, native.facts.model_type),
        ("vocabulary", model.vocab_size, native.vocab_size),
        ("random weights", model.random, native.random),
    ):
        if own != other:
            shown = "" if what == "layers" else f" ({other}, not {own})"
            raise Refused(
                "native_is_another_model",
                f"The native cells run on {native.name}, whose {what} are not those of {model.name}{shown}; name its unquantized "
                "model, as in model: {source: ..., native: ...}.",
            )


def _check_before_loading(spec: Mapping[str, Any], new_tokens: int) -> None:
    """Refuse a context that the model's config excludes before its weights reach the device, where it is known here."""
    try:
        facts = config_facts(spec)
    except (NotAvailable, UsageError):
        return  # the loaded model says what it takes, or why it cannot be loaded
    check_context(facts, spec["context"], new_tokens)


def _with_clips(measured: Measurement, engines: list[Engine]) -> Measurement:
    """With the counts of what a given scale was too small for. Taken before the evidence writes its probe."""
    static = [entry for e in engines if e.store.fmt.scale_kind == "static" for entry in e.store.health()]
    if not any(entry["elements"] for entry in static):
        return measured
    counts = {f"kv_{name}": sum(entry[name] for entry in static) for name in ("elements", "clipped")}
    return replace(measured, facts={**measured.facts, **counts})


def _scale_facts(
    fmt: KVFormat, spec: Mapping[str, Any], pairs: Pairs, found: list[dict[str, Any]]
) -> dict[str, Any]:
    """Where the scales of the format that ran came from, in words and layer by layer."""
    if fmt.scale_kind == "none":
        return {}
    kind, source = origin(fmt, spec["scale"], pairs)
    if any(row[f"{side}_source"] is None for row in found for side in SIDES):
        kind, source = "unknown", f"unknown: not what was asked for, which is {source}"
    return {"scale_kind": kind, "scale_source": source, "scales": found}


def native_of(decision: Decision) -> Decision:
    """The same decision with native KV and native weights: what a baseline arm runs on."""
    native = Choice("native", "native", "baseline")
    return replace(decision, kv_format=native, weights=native, gemm=Choice(AUTO, "native", "native_weights"))


def emulator_of(decision: Decision, spec: Mapping[str, Any]) -> tuple[Decision, dict[str, Any]]:
    """The same with a native cache: what parts of the format are emulated in, on the cell's own weights."""
    choice = replace(decision, kv_format=Choice("native", "native", "baseline"))
    return choice, {**spec, "kv_format": "native", "scale": None}


def _evidence(
    context: Context,
    engines: list[Engine],
    natives: list[Engine],
    emulators: list[Engine],
    decision: Decision,
    session: Session,
    reads_due: bool,
) -> tuple[Evidence, list[dict[str, Any]]]:
    """Evidence of the measured engine (the worst of them when there were several), the native ones' included; and its scales, a
    layer each."""
    for engine in engines + natives + emulators:
        engine.check_health()
    own, beside = (sum(e.computed_tokens for e in arm) for arm in (engines, natives))
    if not engines:
        if reads_due:
            raise KvbenchError(
                "The runner measured without an engine; its numbers cannot belong to this cell."
            )
        context.engine(1, context.spec["page_size"])
    ran = sum((engine.products for engine in engines), Products())
    probes = session.probes(context.model, decision, context.spec, ran)
    examined = [_examined(engine, probes, reads_due) for engine in engines]
    due_own = decision.kv_format.resolved, decision.weights.resolved
    worst, scales = min(
        examined,
        key=lambda pair: ((pair[0].effective, pair[0].effective_weights) == due_own, standing(pair[0])),
    )
    # Literally native, whatever `native_of` says: a baseline that is quantized too must not be what is due.
    arms = (
        (natives, native_of(decision), baseline_spec(context.spec), ("native", "native")),
        (emulators, *emulator_of(decision, context.spec), ("native", decision.weights.resolved)),
    )
    shown = []
    for arm, choice, spec, due in arms:
        ran = sum((engine.products for engine in arm), Products())
        for engine in arm:
            levels = session.probes(engine.model, choice, spec, ran)
            shown.append((examine(engine, *levels, reads_due=reads_due), due))
    if not shown:
        return worst, scales
    return replace(worst, levels=(*worst.levels, native_arm(shown, own, beside))), scales


def evidence_of(
    engine: Engine, decision: Decision, spec: Mapping[str, Any], session: Session
) -> tuple[Evidence, dict[str, Any]]:
    """Evidence of one engine outside a matrix, whose work has ended, and its scales as a record's facts have them.

    decision, spec: what the engine was to be. Raises KvbenchError for values that the format cannot hold.
    """
    engine.check_health()
    probes = session.probes(engine.model, decision, spec, engine.products)
    evidence, found = _examined(engine, probes, reads_due=True)
    fmt = KV_FORMATS[decision.kv_format.resolved]
    return evidence, _scale_facts(fmt, spec, settled_scales(spec, engine.model.facts), found)


def _examined(
    engine: Engine, probes: tuple[Level, ...], reads_due: bool
) -> tuple[Evidence, list[dict[str, Any]]]:
    """Evidence of an engine, and the scales that its run left in the store; where it left no token that it computed, dynamic ones
    are the probe's."""
    left = live_scales(engine.store)
    ran = engine.computed_tokens > 0
    evidence = examine(engine, *probes, reads_due=reads_due)
    if engine.store.fmt.scale_kind == "dynamic" and not (ran and left and left[0]["k"] is not None):
        left = live_scales(engine.store)
    return evidence, provenance(engine, left or [], evidence.levels)
