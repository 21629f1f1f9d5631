"""What runners and the task code ask of an engine, and what an engine declares about itself.

A runner that needs more (the pages of the KV store, the linear layers) imports the reference engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvbench.matrix.resolve_backend import Decision
from kvbench.models.attention_facts import LayerFacts, ModelFacts
from kvbench.records.record import Level

Logits = Literal["all", "last", "none"]


class Model(Protocol):
    """A loaded model. sha: `models.source.fingerprint` of the cell; random: seeded random weights."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def layers(self) -> tuple[LayerFacts, ...]: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def sha(self) -> str: ...
    @property
    def random(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def dtype_name(self) -> str: ...
    def warnings(self, scale: Any = None) -> tuple[str, ...]:
        """Sentences on what a cell with this `scale` leaves unread, and on the weights."""


@dataclass(frozen=True)
class Report:
    """What an engine proves itself. effective, effective_weights: the formats that it shows, or "unknown".
    precision, reads: as `kvbench.records.record.Evidence` holds them."""

    effective: str
    effective_weights: str
    levels: tuple[Level, ...]
    precision: Mapping[str, str]
    reads: Mapping[str, int]


class Engine(Protocol):
    """Sequences of tokens and their KV cache. computed_tokens: tokens of all forwards so far."""

    @property
    def model(self) -> Any: ...
    @property
    def decision(self) -> Decision: ...
    @property
    def spec(self) -> Mapping[str, Any]: ...
    @property
    def computed_tokens(self) -> int: ...

    def add(self) -> int:
        """A new empty sequence."""

    def fork(self, seq: int) -> int:
        """A copy of `seq`."""

    def free(self, seq: int) -> None: ...
    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens of `seq`."""

    def length(self, seq: int) -> int: ...
    def forward(self, work: Sequence[tuple[int, Sequence[int]]], logits: Logits = "last") -> list[Tensor]:
        """Append tokens; float32 logits a pair: [n, V] for "all", [1, V] for "last", [0, V] for "none"."""

    def prefill(self, seq: int, tokens: Sequence[int], logits: Logits = "last") -> Tensor: ...
    def decode(self, seqs: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Append one token to each sequence; float32 logits [B, V]."""

    def greedy_step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Append one token to each sequence; the argmax that follows."""

    def synchronize(self) -> None:
        """Returns when all work on the device is done."""

    def check_health(self) -> None:
        """Raises KvbenchError when the cache holds values that its format cannot hold."""


class Reporting(Engine, Protocol):
    """An engine that proves its levels of evidence itself."""

    def report(self, reads_expected: bool) -> Report:
        """Called once, after the measurement; the engine computes nothing afterwards."""


class EngineKind(Protocol):
    """One engine of `kvbench.engines.ENGINES`.

    evidence_levels: names of `kvbench.records.record.LEVELS` that it can give. reports: its engines are
    `Reporting`; False: `kvbench.evidence` examines them like the reference engine."""

    @property
    def name(self) -> str: ...
    @property
    def evidence_levels(self) -> frozenset[str]: ...
    @property
    def reports(self) -> bool: ...
    def load(self, spec: Mapping[str, Any]) -> Any:
        """The cell's model (a `Model`), ready to run."""

    def decide(self, spec: Mapping[str, Any], facts: ModelFacts) -> Decision:
        """What will run for the spec. Raises Refused where it cannot run as asked."""

    def make(
        self, model: Any, decision: Decision, spec: Mapping[str, Any], *, sequences: int, tokens: int
    ) -> Any:
        """A fresh engine (an `Engine`) with room for `sequences` sequences of `tokens` tokens."""
