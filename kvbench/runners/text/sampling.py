"""Generates the texts of several prompts in one batch, greedy or sampled, until each ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.errors import UsageError
from kvbench.runners.text.feed import feed

if TYPE_CHECKING:
    from kvbench.engines.protocol import Engine


@dataclass(frozen=True)
class Sampler:
    """How a text is continued. until: stop texts; ends: stop tokens; new_tokens: most tokens.

    Sampled texts draw from torch's global generator. top_k, top_p: None means no restriction.
    """

    until: tuple[str, ...]
    new_tokens: int
    ends: frozenset[int]
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise UsageError(f"max_gen_toks: expected at least 1, got {self.new_tokens}.")
        if self.do_sample and not self.temperature > 0:
            raise UsageError(
                f"temperature with do_sample: expected a number above 0, got {self.temperature}."
            )

    def choose(self, logits: Tensor) -> list[int]:
        """One token for each row of float32 logits [B, V]."""
        if not self.do_sample:
            return logits.argmax(-1).tolist()
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        warpers = [TemperatureLogitsWarper(float(self.temperature))]
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        for warp in warpers:
            logits = warp(None, logits)
        return torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()


def write(
    engine: Engine, tokenizer: Any, prompts: Sequence[Sequence[int]], sampler: Sampler
) -> list[list[int]]:
    """The new tokens after each prompt, with the stop token; a text that has ended leaves the batch."""
    seqs = [engine.add() for _ in prompts]
    chunk = engine.spec["prefill_chunk"]
    logits = feed(engine, list(zip(seqs, prompts, strict=True)), chunk, "last")
    texts: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    rows = torch.cat(logits)
    while True:
        for i, token in zip(going, sampler.choose(rows), strict=True):
            texts[i].append(token)
        going = [i for i in going if not _ended(texts[i], tokenizer, sampler)]
        if not going:
            break
        rows = engine.decode([seqs[i] for i in going], [texts[i][-1] for i in going])
    for seq in seqs:
        engine.free(seq)
    return texts


def _ended(ids: Sequence[int], tokenizer: Any, sampler: Sampler) -> bool:
    if ids[-1] in sampler.ends or len(ids) >= sampler.new_tokens:
        return True
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return any(stop and stop in text for stop in sampler.until)
