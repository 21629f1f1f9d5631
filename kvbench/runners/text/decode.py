"""Decoding over an engine: greedy, with drafted tokens verified in one forward, along a given history, and
batches of prompts until each text ends.

Drafting is prompt lookup, and changes the number of forwards, never the text: a drafted token is kept only
where it equals the argmax of plain decoding. End-of-text tokens have no special meaning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.protocol import Engine
from kvbench.errors import UsageError
from kvbench.runners.text.logits import feed

LONGEST_MATCH = 3

Progress = Callable[[int], None]


def _silent(done: int) -> None: ...


@dataclass
class Trace:
    """One entry for each step. best: argmax; margins: top1 - top2 logit; logprobs: of the history's token."""

    best: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forwards: int = 0

    def extend(self, logits: Tensor, taken: Sequence[int]) -> None:
        """Add a forward of n steps: logits [n, V], and the tokens whose log-probabilities are recorded."""
        top = logits.topk(2, dim=-1).values
        index = torch.tensor(taken, device=logits.device)[:, None]
        logprobs = logits.gather(1, index)[:, 0] - logits.logsumexp(dim=-1)
        self.best += logits.argmax(dim=-1).tolist()
        self.margins += (top[:, 0] - top[:, 1]).tolist()
        self.logprobs += logprobs.tolist()
        self.forwards += 1


def propose(history: Sequence[int], n: int) -> list[int]:
    """Up to n tokens that followed the latest earlier occurrence of the last 3 (else 2, else 1) tokens."""
    if n < 1:
        return []
    for size in range(min(LONGEST_MATCH, len(history) - 1), 0, -1):
        suffix = list(history[-size:])
        for end in range(len(history) - 1, size - 1, -1):
            if history[end - 1] == suffix[-1] and list(history[end - size : end]) == suffix:
                text = list(history)
                for i in range(end, end + n):
                    text.append(text[i])
                return text[len(history) :]
    return []


def greedy(
    engine: Engine, seq: int, prompt: list[int], steps: int, draft: int, progress: Progress = _silent
) -> Trace:
    """`steps` greedy tokens after `prompt`, up to `draft` drafted a forward; `seq` then lacks the last."""
    trace = Trace()
    drafted: list[int] = []
    logits = engine.prefill(seq, prompt)
    while True:
        best = logits.argmax(dim=-1).tolist()
        kept = 0
        while kept < len(drafted) and drafted[kept] == best[kept]:
            kept += 1
        # Row i is conditioned on drafted[:i]: rows 0..kept had the same history as plain decoding.
        trace.extend(logits[: kept + 1], best[: kept + 1])
        done = len(trace.best)
        if kept < len(drafted):
            engine.truncate(seq, len(prompt) + done - 1)
        progress(done)
        if done >= steps:
            return trace
        drafted = propose([*prompt, *trace.best], min(draft, steps - done - 1))
        logits = engine.forward([(seq, [trace.best[-1], *drafted])], "all")[0]


def teacher_forced(
    engine: Engine, seq: int, prompt: list[int], tokens: list[int], chunk: int,
    progress: Progress = _silent, neighbour: int | None = None,
) -> Trace:  # fmt: skip
    """The engine's predictions along `tokens` after `prompt`, `chunk` tokens a forward (1: real decoding).

    neighbour: another sequence that gets one token in each forward after the prompt's. At the end `seq` holds
    the prompt and all tokens but the last.
    """
    trace = Trace()
    trace.extend(engine.prefill(seq, prompt), tokens[:1])
    others = [] if neighbour is None else [(neighbour, prompt[:1])]
    for start in range(0, len(tokens) - 1, chunk):
        stop = min(start + chunk, len(tokens) - 1)
        logits = engine.forward([(seq, tokens[start:stop]), *others], "all")[0]
        trace.extend(logits, tokens[start + 1 : stop + 1])
        progress(stop + 1)
    return trace


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
            raise UsageError(f"temperature with do_sample: expected above 0, got {self.temperature}.")

    def ended(self, ids: Sequence[int], tokenizer: Any) -> bool:
        if ids[-1] in self.ends or len(ids) >= self.new_tokens:
            return True
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return any(stop and stop in text for stop in self.until)

    def choose(self, logits: Tensor) -> list[int]:
        """One token for each row of float32 logits [B, V]."""
        if not self.do_sample:
            return logits.argmax(-1).tolist()
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        logits = TemperatureLogitsWarper(float(self.temperature))(None, logits)
        if self.top_k is not None:
            logits = TopKLogitsWarper(self.top_k)(None, logits)
        if self.top_p is not None and self.top_p < 1:
            logits = TopPLogitsWarper(float(self.top_p))(None, logits)
        return torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()


def write(engine: Engine, tokenizer: Any, prompts: list[list[int]], sampler: Sampler) -> list[list[int]]:
    """The new tokens after each prompt, with the stop token; a text that has ended leaves the batch."""
    seqs = [engine.add() for _ in prompts]
    work = list(zip(seqs, prompts, strict=True))
    rows = torch.cat(feed(engine, work, engine.spec["prefill_chunk"], "last"))
    texts: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while True:
        for i, token in zip(going, sampler.choose(rows), strict=True):
            texts[i].append(token)
        going = [i for i in going if not sampler.ended(texts[i], tokenizer)]
        if not going:
            break
        rows = engine.decode([seqs[i] for i in going], [texts[i][-1] for i in going])
    for seq in seqs:
        engine.free(seq)
    return texts
