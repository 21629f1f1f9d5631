"""What the tasks of one run share: the engine, its loaded models, and what its examiner has already found."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.engines import REFERENCE, engine_kind
from kvbench.engines.protocol import EngineKind, Model
from kvbench.evidence.examine import Examiner, examiner_of
from kvbench.models.source import model_key


@dataclass
class Session:
    """At most two models are loaded at a time: a cell's, and its native one where both run.

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
        """The cell's model. beside: the spec of a model that stays loaded.

        alone: no other model stays loaded, since the bytes of the device are counted.
        """
        key = model_key(spec)
        if key not in self._models or alone:
            keep = {key} if beside is None else {key, model_key(beside)}
            self._models = {k: m for k, m in self._models.items() if k in keep}
            gc.collect()
        if key not in self._models:
            self._models[key] = self.kind.load(spec)
        return self._models[key]
