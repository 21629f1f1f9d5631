"""The evidence of an engine: taken here from the reference engine, or reported by the engine itself."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvbench.engines.protocol import EngineKind, Report, Reporting
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.kv.pages import SWAPPED
from kvbench.engines.reference.load import LoadedModel
from kvbench.errors import KvbenchError
from kvbench.evidence.attention_values import probe_prefill, probe_values
from kvbench.evidence.kernels import declared_execution, kernels_level, run_of
from kvbench.evidence.kv_reads import reads_level, store_level
from kvbench.evidence.layer_reads import probe_layers
from kvbench.evidence.page_reads import probe_pages
from kvbench.evidence.probe_values import Make, probe_ids
from kvbench.evidence.products import Products, products_level, rows_of
from kvbench.evidence.scale_sources import live_scales, provenance
from kvbench.evidence.stored_kv import bytes_level, codes_level
from kvbench.evidence.stored_weights import stored_weights, weights_level
from kvbench.evidence.weight_products import probe_after, probe_weights, with_after
from kvbench.files import content_hash
from kvbench.formats.kv import SIDES
from kvbench.matrix.resolve_backend import Decision
from kvbench.models.source import model_key
from kvbench.records.record import LEVELS, NOT_AVAILABLE, UNVERIFIED, Evidence, Level
from kvbench_kernels.launches import record

# Spec keys that make no other engine: cells that differ in these only share their probes.
_NOT_ENGINE = ("batch", "context", "fallback", "plumbing")

Found = tuple[Evidence, list[dict[str, Any]]]  # evidence of one engine, and its scales, a layer each


@dataclass
class ReferenceExaminer:
    """Takes the evidence of reference engines whose work has ended; one for all tasks of a run.

    The probes of a configuration are taken once, on engines made like the measured one.
    """

    _probes: dict[str, tuple[Level, ...]] = field(default_factory=dict)
    _weights: dict[str, tuple[weakref.ref[Any], tuple[Level, ...]]] = field(default_factory=dict)

    def clipped(self, engines: Sequence[Engine]) -> dict[str, int]:
        """Elements written with given scales, and how many of them did not fit; taken before any evidence."""
        static = [entry for e in engines if e.store.fmt.scale_kind == "static" for entry in e.store.health()]
        if not any(entry["elements"] for entry in static):
            return {}
        return {f"kv_{name}": sum(entry[name] for entry in static) for name in ("elements", "clipped")}

    def examine(
        self, engines: Sequence[Engine], decision: Decision, spec: Mapping[str, Any], reads_expected: bool
    ) -> list[Found]:
        """Of the engines of one arm, which share a model. decision, spec: what they were to be.

        reads_expected: the runner's number comes from attention over the cache; to read none is a mismatch.
        """
        if not engines:
            return []
        ran = sum((engine.products for engine in engines), Products())
        probes = self.probes(engines[0].model, decision, spec, ran)
        return [_examined(engine, probes, reads_expected) for engine in engines]

    def probes(
        self, model: LoadedModel, decision: Decision, spec: Mapping[str, Any], ran: Products
    ) -> tuple[Level, ...]:
        """Levels of the configuration; of FP8 weights also after the run that made the products `ran`."""
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
        return self._probes[key] + self.weight_probes(model, decision, spec, ran, make)

    def weight_probes(
        self,
        model: LoadedModel,
        decision: Decision,
        spec: Mapping[str, Any],
        ran: Products,
        make: Make | None = None,
    ) -> tuple[Level, ...]:
        """Levels of the modules that are loaded now; a model that was loaded again is probed again."""
        key = content_hash([model_key(spec), decision.gemm.resolved])
        of, levels = self._weights.get(key, (None, ()))
        new = of is None or of() is not model.model
        if new:
            levels = probe_weights(model, decision, make)
            self._weights[key] = weakref.ref(model.model), levels
        if decision.weights.resolved == "native":
            return levels
        after = probe_after(model, decision, rows_of(ran), None if new else make)
        return tuple(with_after(first, now) for first, now in zip(levels, after, strict=True))


def _examined(engine: Engine, probes: tuple[Level, ...], reads_expected: bool) -> Found:
    """The scales are those that the run left in the store, or of the probe where it left no token."""
    left = live_scales(engine.store)
    ran = engine.computed_tokens > 0
    evidence = examine(engine, *probes, reads_expected=reads_expected)
    if engine.store.fmt.scale_kind == "dynamic" and not (ran and left and left[0]["k"] is not None):
        left = live_scales(engine.store)
    return evidence, provenance(engine, left or [], evidence.levels)


@dataclass(frozen=True)
class ReportExaminer:
    """Asks engines for what they can prove themselves."""

    kind: EngineKind

    def clipped(self, engines: Sequence[Reporting]) -> dict[str, int]:
        return {}

    def examine(
        self, engines: Sequence[Reporting], decision: Decision, spec: Mapping[str, Any], reads_expected: bool
    ) -> list[Found]:
        return [(completed(self.kind, engine.report(reads_expected)), []) for engine in engines]


Examiner = ReferenceExaminer | ReportExaminer


def examiner_of(kind: EngineKind) -> Examiner:
    return ReportExaminer(kind) if kind.reports else ReferenceExaminer()


def completed(kind: EngineKind, report: Report) -> Evidence:
    """The evidence of a report, with the levels it lacks: not available, or unverified where it is declared.

    Raises KvbenchError for a level that the engine does not declare.
    """
    given = {level.name: level for level in report.levels}
    if undeclared := sorted(set(given) - kind.evidence_levels):
        raise KvbenchError(
            f"Engine {kind.name} reports the evidence level {undeclared[0]}, which it does not declare in "
            "evidence_levels; declare it there."
        )
    lacks = f"Engine {kind.name} declares this level and did not report it."
    cannot = f"Engine {kind.name} cannot give this level."
    for name in LEVELS:
        declared = name in kind.evidence_levels
        absent = Level(name, UNVERIFIED, lacks) if declared else Level(name, NOT_AVAILABLE, cannot)
        given.setdefault(name, absent)
    levels = tuple(given[name] for name in LEVELS)
    return Evidence(report.effective, report.effective_weights, levels, report.precision, report.reads)


@torch.inference_mode()
def examine(engine: Engine, *probes: Level, reads_expected: bool) -> Evidence:
    """Evidence of an engine whose measurement has ended; its sequences are freed and its pages poisoned.

    probes: the levels of its configuration. reads_expected: as of `ReferenceExaminer.examine`.
    """
    store = engine.store
    reads = {**store.reads, "due_tokens": engine.due_reads}
    run, products = run_of(engine), engine.products
    e1, effective = bytes_level(engine)
    e1_weights, effective_weights = weights_level(engine.model, engine.decision)
    e3_reads = reads_level(engine, reads, reads_expected)
    for seq in store.sequences():
        give_up = engine.discard_swapped if store.state(seq) == SWAPPED else engine.free
        give_up(seq)
    with record() as prompt:
        seq, token = _write_probe(engine)
    e2, e3 = codes_level(engine), store_level(engine, seq, token)
    engine.truncate(seq, store.page_size - 1)
    step = engine.launches_of_step(seq, token)
    e4_weights, multiplied = products_level(engine, products, run.forwards, step)
    levels = [e1, e2, e3, e3_reads, kernels_level(engine, run, prompt, step), e1_weights, e4_weights, *probes]
    levels.sort(key=lambda level: LEVELS.index(level.name))
    dtypes = {dtype_name(getattr(pages, side).dtype) for pages in store.layers for side in SIDES}
    moved = dict.fromkeys(transfer.precision for transfer in store.transfers)
    precision = {
        "storage": " + ".join(sorted(dtypes)),
        "transfer": " + ".join(moved) or "not measured",
        "execution": declared_execution(engine),
        "weights": stored_weights(engine.model),
        "gemm": multiplied,
    }
    return Evidence(effective, effective_weights, tuple(levels), precision, reads)


def _write_probe(engine: Engine) -> tuple[int, int]:
    """One sequence of page_size - 1 tokens (all layers tapped) and the token to decode next."""
    ids = probe_ids(engine, engine.store.page_size)
    seq = engine.add()
    engine.tap_layers = frozenset(range(len(engine.store.layers)))
    engine.forward([(seq, ids[:-1])], "none")
    engine.tap_layers = frozenset()
    return seq, ids[-1]
