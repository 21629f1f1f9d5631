"""Makes a task ready to run: the checks, the model, the decision, and the context that its runner gets."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvbench.engines import REFERENCE, engine_kind
from kvbench.engines.protocol import EngineKind, Model
from kvbench.errors import NotAvailable, UsageError
from kvbench.evidence.examine import Examiner, examiner_of
from kvbench.formats.scales import Pairs
from kvbench.matrix.cells import Task
from kvbench.matrix.expand import baseline_spec
from kvbench.matrix.resolve_backend import AUTO, Choice, Decision
from kvbench.matrix.runners import RUNNERS
from kvbench.models.source import check_native, config_facts, model_key, settled_scales
from kvbench.records.record import Record
from kvbench.run.task import checks
from kvbench.runners.context import Context

Progress = Callable[[int, int, str], None]
_NATIVE = Choice("native", "native", "baseline")


@dataclass
class Session:
    """What the tasks of one run share. At most two models are loaded: a cell's, and its native one beside it.

    environment: that of `kvbench.machine.host.host()`. engine: a name of `kvbench.engines.ENGINES`.
    """

    data_dir: Path | None
    environment: Mapping[str, Any]
    engine: str = REFERENCE
    _models: dict[str, Model] = field(default_factory=dict)

    @cached_property
    def kind(self) -> EngineKind:
        return engine_kind(self.engine)

    @cached_property
    def examiner(self) -> Examiner:
        return examiner_of(self.kind)

    def model(
        self, spec: Mapping[str, Any], beside: Mapping[str, Any] | None = None, alone: bool = False
    ) -> Any:
        """The cell's model. beside: the spec of one that stays loaded; alone: none stays, to count bytes."""
        key = model_key(spec)
        if key not in self._models or alone:
            keep = {key} if beside is None else {key, model_key(beside)}
            self._models = {k: m for k, m in self._models.items() if k in keep}
            gc.collect()
        if key not in self._models:
            self._models[key] = self.kind.load(spec)
        return self._models[key]


@dataclass
class Arm:
    """The engines that a task makes of one decision. model(): loads theirs, or returns the loaded one."""

    session: Session
    decision: Decision
    spec: Mapping[str, Any]
    model: Callable[[], Any]
    engines: list[Any] = field(default_factory=list)

    def make(self, sequences: int = 1, tokens: int | None = None) -> Any:
        """A fresh engine; tokens: of a sequence, the cell's prefill chunk by default."""
        tokens = self.spec["prefill_chunk"] if tokens is None else tokens
        kind = self.session.kind
        made = kind.make(self.model(), self.decision, self.spec, sequences=sequences, tokens=tokens)
        self.engines.append(made)
        return made

    @property
    def computed_tokens(self) -> int:
        return sum(engine.computed_tokens for engine in self.engines)


@dataclass(frozen=True)
class Prepared:
    context: Context
    own: Arm  # the measured engines
    native: Arm  # those of the baseline beside them
    emulator: Arm  # the cell's model over a native cache
    scales: Pairs  # the static scales that the cell asks for, a layer each


def prepare(task: Task, session: Session, baseline: Record | None, progress: Progress) -> Prepared:
    """Raises Refused or NotAvailable for a task that may not run (`kvbench.run.task.checks`)."""
    spec = task.spec
    check_native(spec)
    checks.require(checks.quality_on_random_weights(task), checks.baseline_missing(task, baseline))
    require_device(spec, session.environment)
    try:
        facts = config_facts(spec)
    except (NotAvailable, UsageError):
        pass  # loading the model shows its positions, or why it cannot be loaded
    else:
        checks.require(checks.too_long(task, facts))
    model = session.model(spec, alone=not RUNNERS[task.runner].beside)
    decision = session.kind.decide(spec, model.facts)
    scales = settled_scales(spec, model.facts)
    checks.require(checks.too_long(task, model.facts))
    native_spec = baseline_spec(spec)

    def native_model() -> Any:
        beside = session.model(native_spec, beside=spec)
        checks.require(checks.another_model(model, beside))
        return beside

    own = Arm(session, decision, spec, lambda: model)
    native = Arm(session, native_of(decision), native_spec, native_model)
    emulator = Arm(session, *emulator_of(decision, spec), lambda: model)
    context = Context(
        spec=spec,
        options=task.options,
        variant=task.variant,
        model=model,
        engine=own.make,
        native=native.make,
        emulator=emulator.make,
        baseline=baseline,
        is_baseline=task.baseline is None,
        data_dir=session.data_dir,
        progress=progress,
    )
    return Prepared(context, own, native, emulator, scales)


def require_device(spec: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Raises Refused for device: cuda on a machine without it."""
    why = environment.get("device_reason")
    checks.require(checks.no_cuda_device(spec, torch.cuda.is_available(), why))


def native_of(decision: Decision) -> Decision:
    """The same decision with native KV and native weights: what a baseline runs on."""
    gemm = Choice(AUTO, "native", "native_weights")
    return replace(decision, kv_format=_NATIVE, weights=_NATIVE, gemm=gemm)


def emulator_of(decision: Decision, spec: Mapping[str, Any]) -> tuple[Decision, dict[str, Any]]:
    """The same with a native cache, in which a runner emulates parts of the format."""
    return replace(decision, kv_format=_NATIVE), {**spec, "kv_format": "native", "scale": None}
