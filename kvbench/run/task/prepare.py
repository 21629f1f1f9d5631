"""Makes a task ready to run: the checks, the model, the decision, and the context that its runner gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvbench.errors import NotAvailable, UsageError
from kvbench.formats.scales import Pairs
from kvbench.matrix.cells import Task
from kvbench.matrix.expand import baseline_spec
from kvbench.matrix.resolve import AUTO, Choice, Decision
from kvbench.matrix.runners import RUNNERS
from kvbench.models.source import check_native, config_facts, settled_scales
from kvbench.records.record import Record
from kvbench.run.task.checks import (
    another_model,
    baseline_missing,
    no_cuda_device,
    quality_on_random_weights,
    require,
    too_long,
)
from kvbench.run.task.models import Session
from kvbench.runners.context import Context

Progress = Callable[[int, int, str], None]
_NATIVE = Choice("native", "native", "baseline")


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
        made = self.session.kind.make(
            self.model(), self.decision, self.spec, sequences=sequences, tokens=tokens
        )
        self.engines.append(made)
        return made

    @property
    def computed_tokens(self) -> int:
        return sum(engine.computed_tokens for engine in self.engines)


@dataclass(frozen=True)
class Prepared:
    """own: the measured engines; native: those of the baseline beside them; emulator: of the cell's model
    over a native cache.

    scales: the static scales that the cell asks for, a layer each.
    """

    context: Context
    own: Arm
    native: Arm
    emulator: Arm
    scales: Pairs


def prepare(task: Task, session: Session, baseline: Record | None, progress: Progress) -> Prepared:
    """Raises Refused or NotAvailable for a task that may not run (`kvbench.run.task.checks`)."""
    spec = task.spec
    check_native(spec)
    require(quality_on_random_weights(task), baseline_missing(task, baseline))
    require_device(spec, session.environment)
    _check_before_loading(task)
    model = session.model(spec, alone=not RUNNERS[task.runner].beside)
    decision = session.kind.decide(spec, model.facts)
    scales = settled_scales(spec, model.facts)
    require(too_long(task, model.facts))

    native_spec = baseline_spec(spec)

    def native_model() -> Any:
        beside = session.model(native_spec, beside=spec)
        require(another_model(model, beside))
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
        data_dir=session.data_dir,
        progress=progress,
    )
    return Prepared(context, own, native, emulator, scales)


def require_device(spec: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Raises Refused for device: cuda on a machine without it."""
    require(no_cuda_device(spec, torch.cuda.is_available(), environment.get("device_reason")))


def _check_before_loading(task: Task) -> None:
    """Refuses a context that is too long before any weight is loaded, where the config is known here."""
    try:
        facts = config_facts(task.spec)
    except (NotAvailable, UsageError):
        return  # loading the model shows its positions, or why it cannot be loaded
    require(too_long(task, facts))


def native_of(decision: Decision) -> Decision:
    """The same decision with native KV and native weights: what a baseline runs on."""
    return replace(
        decision, kv_format=_NATIVE, weights=_NATIVE, gemm=Choice(AUTO, "native", "native_weights")
    )


def emulator_of(decision: Decision, spec: Mapping[str, Any]) -> tuple[Decision, dict[str, Any]]:
    """The same with a native cache, in which a runner emulates parts of the format."""
    return replace(decision, kv_format=_NATIVE), {**spec, "kv_format": "native", "scale": None}
