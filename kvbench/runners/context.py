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

    engine(sequences=n, tokens=t): a new `kvbench.engines.protocol.Engine` in the task's resolved format with
    just the pages for n sequences of t tokens; native(...): the same for the baseline cell. The use of both
    is recorded as evidence. emulator(...): the cell's own model over a native cache, in which a runner may
    emulate a part of the format; the runner has to show that the emulation equals what the cell stores.
    is_baseline: whether this task is the baseline of others. baseline: the baseline's record of the same
    work, or None where there is none. data_dir: folder of the evaluation data, or None.
    progress(done, total, note): updates the bar on stderr.
    """

    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    variant: str
    model: LoadedModel
    engine: Callable[..., Any]
    native: Callable[..., Any]
    emulator: Callable[..., Any]
    baseline: Record | None
    is_baseline: bool
    data_dir: Path | None
    progress: Callable[[int, int, str], None] = field(default=lambda done, total, note: None)


@dataclass(frozen=True)
class Measurement:
    """samples: raw; facts: counts, hashes, protocol (both JSON). partial: why it is not the whole."""

    samples: Mapping[str, Any]
    facts: Mapping[str, Any]
    partial: str | None = None
