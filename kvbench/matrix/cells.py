"""Cells and tasks: one point of a matrix, and one piece of work on it.

A cell is frozen and has a value for every key of `CELL_KEYS`. A task is one runner (with its options) on the
cell keys that the runner depends on. Cells that agree on those keys share the task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.formats.scales import short
from kvbench.matrix.keys import CELL_KEYS
from kvbench.text import show

__all__ = ["CELL_KEYS", "MODEL_NAMES", "Cell", "Task", "one_model", "text"]

MODEL_NAMES = ("model", "model_revision", "native_model")  # the cell keys that name the model


def text(value: Any) -> str:
    """A cell value as names and `-k` write it: int8_sym, 4, true, null, 0.05; `scales.short` for scales."""
    if isinstance(value, dict):
        return short(value)
    return value if isinstance(value, str) else show(value)


def one_model(specs: Sequence[Mapping[str, Any]]) -> str | None:
    """The model of all cells, such as `fp8, native weights from whole`; None where there are several."""
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
    """One point of the matrix. spec: exactly the keys of CELL_KEYS. line: of the matrix file. baseline: the
    id of the native cell that it is compared with, its own when it is one. varied: the keys that the matrix
    varies, in matrix order; they make the cell's name."""

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
    """One runner on one projected spec. cells: the ids of the cells that share it.

    variant: tells the tasks of one runner apart ("wikitext2 stream512"), or "". baseline: key of the same
    work on the baseline cells, None when this is the baseline. digests: {"model": ..., "native": ..., "data":
    [...]}, the contents that went into the key."""

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
