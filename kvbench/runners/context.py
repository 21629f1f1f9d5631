"""What a runner gets and what it gives back."""

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

    engine(sequences=n, tokens=t): a fresh engine (`kvbench.engines.protocol.Engine`) in the task's resolved format, with an own store of just the pages
    that n sequences of t tokens need; native(...): the same of the baseline cell (native KV, same model, dtype, page
    size). Both give engines whose use is recorded as evidence. emulator(...): of the cell's own model over a native cache, in
    which a runner may emulate a part of the format; it is examined too, but its tokens are not the measured engine's, so the
    runner has to show that what it emulates is what the cell stores.
    baseline: the baseline's record of the same work, or None when this task is the baseline.
    data_dir: folder of the evaluation data, or None. progress(done, total, note): for the bar on stderr.
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
