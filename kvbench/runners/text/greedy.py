"""Greedy decoding over an engine: plain, with drafted tokens verified in one forward, and along a given
history.

Drafting is prompt lookup: no second model, only repetitions of the history. It changes the number of
forwards, never the text: a drafted token is kept only where it equals the argmax of plain decoding, and the
store is truncated to the kept tokens. End-of-text tokens have no special meaning here: N steps are N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.engines.protocol import Engine

LONGEST_MATCH = 3

Progress = Callable[[int], None]


@dataclass
class Trace:
    """One entry for each step. best: argmax; margins: top1 - top2 logit; logprobs: of the history's token."""

    best: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forwards: int = 0

    def extend(self, logits: Tensor, best: Sequence[int], taken: Sequence[int]) -> None:
        """Add n steps: logits [n, V], their argmax, and the tokens whose log-probabilities are recorded."""
        top = logits.topk(2, dim=-1).values
        index = torch.tensor(taken, device=logits.device)[:, None]
        logprobs = logits.gather(1, index)[:, 0] - logits.logsumexp(dim=-1)
        self.best += best
        self.margins += (top[:, 0] - top[:, 1]).tolist()
        self.logprobs += logprobs.tolist()


def propose(history: Sequence[int], n: int) -> list[int]:
    """Up to n tokens that followed the latest earlier occurrence of the history's last 3 (else 2, else 1)
    tokens.

    The copy continues into its own proposal, so a loop of any period gives all n tokens.
    """
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
    engine: Engine,
    seq: int,
    prompt: Sequence[int],
    steps: int,
    draft: int,
    progress: Progress = lambda done: None,
) -> Trace:
    """`steps` greedy tokens after `prompt`; up to `draft` drafted tokens a forward (0: one decode step a
    token).

    At the end `seq` holds the prompt and all tokens but the last, in either mode.
    """
    trace = Trace()
    drafted: list[int] = []
    logits = engine.prefill(seq, prompt)
    while True:
        trace.forwards += 1
        best = logits.argmax(dim=-1).tolist()
        kept = 0
        while kept < len(drafted) and drafted[kept] == best[kept]:
            kept += 1
        # Row i is conditioned on drafted[:i]: rows 0..kept had the same history as plain decoding.
        trace.extend(logits[: kept + 1], best[: kept + 1], best[: kept + 1])
        done = len(trace.best)
        if kept < len(drafted):
            engine.truncate(seq, len(prompt) + done - 1)
        progress(done)
        if done >= steps:
            return trace
        drafted = propose([*prompt, *trace.best], min(draft, steps - done - 1))
        logits = engine.forward([(seq, [trace.best[-1], *drafted])], "all")[0]


def teacher_forced(
    engine: Engine,
    seq: int,
    prompt: Sequence[int],
    tokens: Sequence[int],
    chunk: int,
    progress: Progress = lambda done: None,
    neighbour: int | None = None,
) -> Trace:
    """The engine's predictions along a given history: `tokens` after `prompt`, `chunk` tokens a forward.

    chunk 1 is real decoding. neighbour: another sequence that gets one token in each forward after the
    prompt's. At the end `seq` holds the prompt and all tokens but the last.
    """
    trace = Trace(forwards=1)
    logits = engine.prefill(seq, prompt)
    trace.extend(logits, logits.argmax(dim=-1).tolist(), tokens[:1])
    for start in range(0, len(tokens) - 1, chunk):
        stop = min(start + chunk, len(tokens) - 1)
        others = [] if neighbour is None else [(neighbour, prompt[:1])]
        logits = engine.forward([(seq, tokens[start:stop]), *others], "all")[0]
        trace.extend(logits, logits.argmax(dim=-1).tolist(), tokens[start + 1 : stop + 1])
        trace.forwards += 1
        progress(stop + 1)
    return trace
