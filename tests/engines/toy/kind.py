"""An engine without a KV cache of its own kind: the next token's logits follow from the last two tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.protocol import Logits, Report
from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.matrix.resolve_backend import Choice, Decision
from kvbench.models.attention_facts import LayerFacts, ModelFacts
from kvbench.models.source import config_facts
from kvbench.records.record import VERIFIED, Level

NATIVE = Choice("native", "native", "requested")


class ToyModel:
    name, sha, random = "toy", "toy", True
    device, dtype, dtype_name = torch.device("cpu"), torch.float32, "float32"

    def __init__(self, facts: ModelFacts) -> None:
        self.facts, self.tokenizer = facts, byte_tokenizer()

    @property
    def layers(self) -> tuple[LayerFacts, ...]:
        return self.facts.layers

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def warnings(self, scale: Any = None) -> tuple[str, ...]:
        return ()


class ToyEngine:
    def __init__(self, model: ToyModel, decision: Decision, spec: Mapping[str, Any]) -> None:
        self.model, self.decision, self.spec = model, decision, spec
        self.computed_tokens = 0
        self._held: dict[int, list[int]] = {}
        self._made = 0

    def add(self) -> int:
        self._made += 1
        self._held[self._made] = []
        return self._made

    def fork(self, seq: int) -> int:
        copy = self.add()
        self._held[copy] = list(self._held[seq])
        return copy

    def free(self, seq: int) -> None:
        del self._held[seq]

    def truncate(self, seq: int, length: int) -> None:
        del self._held[seq][length:]

    def length(self, seq: int) -> int:
        return len(self._held[seq])

    def forward(self, work: Sequence[tuple[int, Sequence[int]]], logits: Logits = "last") -> list[Tensor]:
        out = []
        for seq, tokens in work:
            held = self._held[seq]
            rows = []
            for token in tokens:
                held.append(int(token))
                generator = torch.Generator().manual_seed(sum(held[-2:]))
                rows.append(torch.randn(self.model.vocab_size, generator=generator))
            self.computed_tokens += len(tokens)
            out.append(
                torch.stack(rows)[{"all": slice(None), "last": slice(-1, None), "none": slice(0)}[logits]]
            )
        return out

    def prefill(self, seq: int, tokens: Sequence[int], logits: Logits = "last") -> Tensor:
        return self.forward([(seq, tokens)], logits)[0]

    def decode(self, seqs: Sequence[int], tokens: Sequence[int]) -> Tensor:
        return torch.cat(self.forward([(s, [t]) for s, t in zip(seqs, tokens, strict=True)]))

    def greedy_step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        return self.decode(seqs, tokens).argmax(-1).tolist()

    def synchronize(self) -> None: ...
    def check_health(self) -> None: ...

    def report(self, reads_expected: bool) -> Report:
        levels = tuple(Level(name, VERIFIED, "The toy stores tokens.") for name in ("E1", "E1-weights"))
        return Report("native", "native", levels, {"storage": "int"}, {"tokens": self.computed_tokens})


class Toy:
    name = "toy"
    evidence_levels = frozenset({"E1", "E1-weights", "E4"})  # E4 is declared and never reported
    reports = True

    def load(self, spec: Mapping[str, Any]) -> ToyModel:
        return ToyModel(config_facts(spec))

    def decide(self, spec: Mapping[str, Any], facts: ModelFacts) -> Decision:
        return Decision(NATIVE, NATIVE, Choice(spec["backend"], "torch", "best_available"))

    def make(
        self, model: Any, decision: Decision, spec: Mapping[str, Any], *, sequences: int, tokens: int
    ) -> ToyEngine:
        return ToyEngine(model, decision, spec)


KIND = Toy()
