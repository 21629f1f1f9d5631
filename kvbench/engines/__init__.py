"""Engines: what runs a model with a KV cache in the requested format. One package an engine.

To add one: a package `kvbench/engines/<name>/` whose module `kind` holds `KIND` (`protocol.EngineKind`), and
its name below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvbench.errors import UsageError

if TYPE_CHECKING:
    from kvbench.engines.protocol import EngineKind

REFERENCE = "reference"

# Engine -> the module that holds its `KIND`.
ENGINES: dict[str, str] = {REFERENCE: "kvbench.engines.reference.kind"}


def engine_kind(name: str = REFERENCE) -> EngineKind:
    """The engine of that name, imported now. Raises UsageError for an unknown one."""
    if name not in ENGINES:
        raise UsageError(f"Engine {name!r} is unknown; choose one of {', '.join(ENGINES)}.")
    kind: EngineKind = importlib.import_module(ENGINES[name]).KIND
    return kind
