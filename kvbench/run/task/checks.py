"""Rules that must hold before a task is measured. `validate` reports them; a task that breaks one is refused.

Each rule is a pure function: None when it holds, else a `Rejected` with a stable reason and a sentence.
"""

from collections.abc import Mapping
from typing import Any

from kvbench.errors import NO_DEVICE, NotAvailable, Refused
from kvbench.matrix.cells import Task
from kvbench.matrix.resolve_backend import context_fault
from kvbench.matrix.runners import RUNNERS
from kvbench.models.attention_facts import ModelFacts
from kvbench.models.source import uses_random_weights
from kvbench.records.record import OK, Record
from kvbench_kernels.support import Rejected

NO_BASELINE = "no_baseline"


def random_weights(what: str, spec: Mapping[str, Any]) -> Rejected | None:
    """Quality cannot be measured on random weights. what: the runner or harness that measures it."""
    if spec["plumbing"] or not uses_random_weights(spec):
        return None
    return Rejected(
        "random_weights",
        f"{what} measures quality, and the model {spec['model']} has random weights. Use a checkpoint, or "
        "set plumbing: true for a run that only exercises the code and is marked partial.",
    )


def quality_on_random_weights(task: Task) -> Rejected | None:
    return random_weights(task.runner, task.spec) if RUNNERS[task.runner].quality else None


def baseline_missing(task: Task, baseline: Record | None) -> Rejected | None:
    """A quality task needs the finished record of its native baseline."""
    if not RUNNERS[task.runner].quality or task.baseline is None:
        return None
    if baseline is not None and baseline.status == OK:
        return None
    why = "has not run"
    if baseline is not None:
        why = f"ended as {baseline.status}: {str((baseline.error or {}).get('message')).rstrip('.')}"
    return Rejected(NO_BASELINE, f"{task.runner} compares with its native baseline, which {why}.")


def no_cuda_device(spec: Mapping[str, Any], cuda: bool, why: object) -> Rejected | None:
    """A cell with device: cuda needs one. cuda: whether this machine has one; why: why it has none."""
    if spec["device"] != "cuda" or cuda:
        return None
    return Rejected(
        NO_DEVICE,
        f"The cell asks for device: cuda, and this machine has no CUDA device: {why}. Use device: auto, or "
        "run on a machine with a GPU.",
    )


def too_long(task: Task, facts: ModelFacts) -> Rejected | None:
    """The tokens need more positions than the model has. A runner that ignores the context always fits."""
    if "context" in RUNNERS[task.runner].ignores:
        return None
    return context_fault(facts, task.spec["context"], task.options.get("new_tokens", 0))


def another_model(model: Any, native: Any) -> Rejected | None:
    """The native cells must run on the same model (both loaded): only the weights' format may differ."""
    for what, own, other in (
        ("layers", model.facts.layers, native.facts.layers),
        ("model_type", model.facts.model_type, native.facts.model_type),
        ("vocabulary", model.vocab_size, native.vocab_size),
        ("random weights", model.random, native.random),
    ):
        if own != other:
            shown = "" if what == "layers" else f" ({other}, not {own})"
            return Rejected(
                "native_is_another_model",
                f"The native cells run on {native.name}, whose {what} differ from {model.name}'s{shown}. "
                "Name its unquantized model: model: {source: ..., native: ...}.",
            )
    return None


def require(*found: Rejected | None) -> None:
    """Raises Refused for the first rule that does not hold, NotAvailable where the baseline is missing."""
    for fault in found:
        if fault is not None:
            if fault.reason == NO_BASELINE:
                raise NotAvailable(fault.sentence)
            raise Refused(fault.reason, fault.sentence)
