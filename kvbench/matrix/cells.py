"""Cells and tasks: one point of a matrix, and one piece of work on it.

A cell is frozen and complete: every key of `CELL_KEYS` has a value, nothing is left to a later default. A
task is one runner (with its options) on the cell keys that the runner depends on; cells that agree on those
keys share the task, so quality work is not repeated over batch and context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.matrix.keys import CELL_KEYS

__all__ = ["CELL_KEYS", "MODEL_NAMES", "Cell", "Task", "one_model"]

# The keys that say which model it is; they go by `weights` where an FP8 checkpoint has a native model.
MODEL_NAMES = ("model", "model_revision", "native_model")


def one_model(specs: Sequence[Mapping[str, Any]]) -> str | None:
    """The model of all cells, `fp8, native weights from whole` where cells with native weights run on another
    one, by which `weights` already tells them apart; None where there are several, which must be named cell
    by cell."""
    native = {spec.get("native_model") or spec.get("model") for spec in specs}
    loaded = {tuple(spec.get(key) for key in ("weights", *MODEL_NAMES)) for spec in specs}
    if len(native) != 1 or len(loaded) > len({weights for weights, *_ in loaded}):
        return None
    spec = next((s for s in specs if s.get("native_model")), specs[0])
    revision = f"@{spec['model_revision']}" if spec.get("model_revision") else ""
    other = f", native weights from {spec['native_model']}" if spec.get("native_model") else ""
    return f"{spec.get('model')}{revision}{other}"


@dataclass(frozen=True)
class Cell:
    """One point of the matrix. `spec` has exactly the keys of CELL_KEYS; `line` is the matrix line it came
    from.

    baseline: the id of the native cell it is compared with, or its own id when it is one. varied: the keys
    that the matrix varies, in matrix order (they make the cell's short name); of the model, where there are
    several."""

    id: str
    name: str
    spec: Mapping[str, Any]
    varied: tuple[str, ...]
    baseline: str
    line: int | None = None

    @property
    def is_baseline(self) -> bool:
        return self.baseline == self.id


@dataclass(frozen=True)
class Task:
    """One runner on one projected spec. `cells` are the ids of the cells that share it.

    variant: what the runner measures when one runner makes several tasks ("wikitext2", "mmlu-5shot"), or "".
    baseline: key of the same work on the baseline cells, or None when this is the baseline. digests:
    {"model": ..., "native": ..., "data": [...]}, the contents that went into the key; {} where nobody gave
    any."""

    key: str
    runner: str
    variant: str
    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    cells: tuple[str, ...]
    baseline: str | None
    digests: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """`perplexity wikitext2 stream512`"""
        return f"{self.runner} {self.variant}".strip()
