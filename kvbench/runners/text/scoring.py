"""Log-probabilities of the choices of many questions, with their common prefix computed once.

A forward over the prefix is forked for each question, and that for each choice; a fork shares the full pages
of its parent. Where every choice is one token, the question's last logits give all scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvbench.engines.protocol import Engine
from kvbench.formats.kv import pages_for
from kvbench.runners.text.encode import Pair, common_prefix
from kvbench.runners.text.logits import budget, feed, logprobs, packed


@dataclass(frozen=True)
class Group:
    """Questions that share `prefix`; items: the rest of each, at least one token of context. mixed: a forward
    has short and long ones together, which costs time and gives each other neighbours.
    """

    prefix: tuple[int, ...]
    items: tuple[Pair, ...]
    mixed: bool = False


def group(pairs: Sequence[Pair], share: bool = True, mixed: bool = False) -> Group:
    """The questions with the longest common prefix of their contexts taken out; none if not `share`."""
    n = common_prefix([p.context for p in pairs]) if share and len(pairs) > 1 else 0
    items = tuple(Pair(p.context[n:], p.continuations, p.merged) for p in pairs)
    return Group(pairs[0].context[:n], items, mixed)


def batches(g: Group, device: torch.device) -> list[list[int]]:
    """Indexes of the questions of each forward: shortest first, or mixed: the longest, the shortest, ..."""
    lengths = [len(item.context) for item in g.items]
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    if g.mixed:
        order = [order[-1 - k // 2] if k % 2 == 0 else order[k // 2] for k in range(len(order))]
    packs = packed([lengths[i] for i in order], budget(device))
    return [[order[i] for i in pack] for pack in packs]


def capacity(groups: Sequence[Group], device: torch.device, page_size: int) -> int:
    """Pages for the largest batch: prefix, questions and choices; each fork copies its last page."""
    most = 1
    for g in groups:
        shared = pages_for(len(g.prefix), page_size)
        for batch in batches(g, device):
            items = [g.items[i] for i in batch]
            rests = [len(c) for item in items for c in item.continuations if len(c) > 1]
            packs = packed([n - 1 for n in rests], budget(device))
            own = sum(pages_for(len(item.context), page_size) + 1 for item in items)
            forks = max((sum(pages_for(rests[i], page_size) + 1 for i in pack) for pack in packs), default=0)
            most = max(most, shared + own + forks)
    return most


@dataclass(frozen=True)
class ChoiceScore:
    """One choice: its summed log-probability, and whether greedy decoding would have produced it."""

    logprob: float = 0.0
    greedy: bool = True

    def __add__(self, more: ChoiceScore) -> ChoiceScore:
        return ChoiceScore(self.logprob + more.logprob, self.greedy and more.greedy)


Scores = list[list[ChoiceScore]]  # of each question's choices


def score(engine: Engine, g: Group, chunk: int) -> Iterator[tuple[list[int], list[list[float]], int]]:
    """As `score_choices`, but only the summed log-probabilities."""
    for batch, scores, computed in score_choices(engine, g, chunk):
        yield batch, [[choice.logprob for choice in own] for own in scores], computed


def score_choices(engine: Engine, g: Group, chunk: int) -> Iterator[tuple[list[int], Scores, int]]:
    """Batch by batch: indexes of questions, their scores, tokens computed (the prefix's in the first batch).

    chunk: most tokens of a sequence in one forward.
    """
    computed = len(g.prefix)
    root = engine.add()
    if g.prefix:
        feed(engine, [(root, g.prefix)], chunk, "none")
    for batch in batches(g, engine.model.device):
        items = [g.items[i] for i in batch]
        seqs = [engine.fork(root) for _ in batch]
        last = feed(engine, [(s, item.context) for s, item in zip(seqs, items, strict=True)], chunk, "last")
        firsts = _firsts(last, items)
        rests, extra = _rests(engine, seqs, items, chunk)
        for seq in seqs:
            engine.free(seq)
        scores = [[a + b for a, b in zip(f, r, strict=True)] for f, r in zip(firsts, rests, strict=True)]
        yield batch, scores, computed + sum(len(item.context) for item in items) + extra
        computed = 0
    engine.free(root)


def _firsts(last: Sequence[Tensor], items: Sequence[Pair]) -> Scores:
    """The scores of each choice's first token, from the logits of the question's last token."""
    counts = [len(item.continuations) for item in items]
    rows = torch.cat([logits.expand(n, -1) for logits, n in zip(last, counts, strict=True)])
    firsts = torch.tensor([c[0] for item in items for c in item.continuations], device=rows.device)
    best = torch.cat([logits.argmax(-1).expand(n) for logits, n in zip(last, counts, strict=True)]) == firsts
    flat = [ChoiceScore(*own) for own in zip(logprobs(rows, firsts).tolist(), best.tolist(), strict=True)]
    return [flat[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]


def _rests(engine: Engine, seqs: list[int], items: Sequence[Pair], chunk: int) -> tuple[Scores, int]:
    """The scores of each choice's tokens after the first, and tokens computed."""
    sums = [[ChoiceScore()] * len(item.continuations) for item in items]
    every = ((row, i, c) for row, item in enumerate(items) for i, c in enumerate(item.continuations))
    places = [place for place in every if len(place[2]) > 1]
    for pack in packed([len(c) - 1 for _, _, c in places], budget(engine.model.device)):
        chosen = [places[i] for i in pack]
        forks = [engine.fork(seqs[row]) for row, _, _ in chosen]
        longest = max(len(c) for _, _, c in chosen) - 1
        for start in range(0, longest, chunk):  # a device does not hold the logits of a long text
            open_ = [i for i, (_, _, c) in enumerate(chosen) if len(c) - 1 > start]
            ends = {i: min(start + chunk, len(chosen[i][2]) - 1) for i in open_}
            logits = engine.forward([(forks[i], chosen[i][2][start : ends[i]]) for i in open_], "all")
            for i, own in zip(open_, logits, strict=True):
                row, choice, c = chosen[i]
                targets = torch.tensor(c[start + 1 : ends[i] + 1], device=own.device)
                greedy = bool((own.argmax(-1) == targets).all())
                sums[row][choice] += ChoiceScore(float(logprobs(own, targets).sum()), greedy)
        for fork in forks:
            engine.free(fork)
    return sums, sum(len(c) - 1 for _, _, c in places)
