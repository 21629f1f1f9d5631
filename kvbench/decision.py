"""The resolver: what was asked for, what will run, and why. Pure: no torch, no files, no globals.

`resolve(request, facts)` never drops anything in silence. Each aspect (kv_format, weights, backend) becomes a
`Choice` with the requested and the resolved value, a reason, and the options that were rejected with theirs.
Requested != resolved is a declared fallback (allowed only with `fallback: allow`); resolved != effective, found
later from evidence, is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import Refused
from kvbench.formats import KV_FORMATS, KVShape


@dataclass(frozen=True)
class Accepted:
    """`supports(...)` said yes."""


@dataclass(frozen=True)
class Rejected:
    """`supports(...)` said no. `reason` is a stable word, `sentence` tells a person why."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class LayerFacts:
    """What one attention layer needs. `kind` is "full", "sliding", "mla" or the config's own word for anything else."""

    kind: str
    q_heads: int
    shape: KVShape
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model, from its config (before loading) and its modules (after); both must agree.

    max_context is None when the config names no limit. `unsupported` lists attributes of the config that the
    engine does not implement, as (attribute, sentence).
    """

    model_type: str
    layers: tuple[LayerFacts, ...]
    max_context: int | None
    unsupported: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Request:
    kv_format: str
    weights: str
    backend: str
    fallback: str  # "allow" or "refuse"


@dataclass(frozen=True)
class Choice:
    """One aspect of a decision. `rejected` holds (option, reason) pairs."""

    requested: str
    resolved: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    @property
    def fell_back(self) -> bool:
        return self.requested != self.resolved


@dataclass(frozen=True)
class Decision:
    kv_format: Choice
    weights: Choice
    backend: Choice

    @property
    def fell_back(self) -> bool:
        return any(c.fell_back for c in (self.kv_format, self.weights, self.backend))
