"""The input and the output of a runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.engines.reference.load import LoadedModel
    from kvbench.records.record import Record


@dataclass(frozen=True)
class Context:
    """spec, options: the task's, expanded. model: loaded once and shared by the engines of a run.

    engine(sequences=n, tokens=t): a new `kvbench.engines.protocol.Engine` in the task's resolved format,
    whose store has just the pages for n sequences of t tokens; native(...): the same for the baseline cell
    (native KV, same model, dtype, page size). The use of both is recorded as evidence. emulator(...): the
    cell's own model over a native cache, in which a runner may emulate a part of the format. It is examined
    too, but its tokens are not those of the measured engine, so the runner has to show that the emulation
    equals what the cell stores. baseline: the baseline's record of the same work, or None when this task is
    the baseline. data_dir: folder of the evaluation data, or None. progress(done, total, note): updates the
    bar on stderr.
    """

    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    variant: str
    model: LoadedModel
    engine: Callable[..., Any]
    native: Callable[..., Any]
    emulator: Callable[..., Any]
    baseline: Record | None
    data_dir: Path | None
    progress: Callable[[int, int, str], None] = field(default=lambda done, total, note: None)

    @property
    def is_baseline(self) -> bool:
        return self.baseline is None


@dataclass(frozen=True)
class Measurement:
    """samples: raw samples by name (JSON lists and numbers); facts: counts, hashes, protocol facts (JSON).

    partial: why the result covers less than the whole, or None.
    """

    samples: Mapping[str, Any]
    facts: Mapping[str, Any]
    partial: str | None = None
