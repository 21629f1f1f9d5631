"""What the reference engine declares: every level of evidence, examined by `kvbench.evidence`."""

from collections.abc import Mapping
from typing import Any

from kvbench.engines import REFERENCE
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.matrix.resolve_backend import Decision, request_of, resolve
from kvbench.models.attention_facts import ModelFacts
from kvbench.records.record import LEVELS


class Reference:
    """transformers models over kvbench's own paged KV store."""

    name = REFERENCE
    evidence_levels = frozenset(LEVELS)
    reports = False

    def load(self, spec: Mapping[str, Any]) -> LoadedModel:
        return load_model(spec, spec["device"], spec["dtype"])

    def decide(self, spec: Mapping[str, Any], facts: ModelFacts) -> Decision:
        return resolve(request_of(spec), facts)

    def make(
        self, model: LoadedModel, decision: Decision, spec: Mapping[str, Any], *, sequences: int, tokens: int
    ) -> Engine:
        return Engine(model, decision, spec, sequences=sequences, tokens=tokens)


KIND = Reference()
