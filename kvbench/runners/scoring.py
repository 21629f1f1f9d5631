"""Log-probabilities of the choices of many questions, with their common prefix computed once.

    prefix (once a group) -> fork a question, run its own tokens -> fork a choice, run its tokens but the last

A fork shares the full pages of what it comes from. When every choice of a question is one token, the question's last
logits hold all its scores and no choice is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.formats import pages_for
from kvbench.runners.encode import Pair, common_prefix
from kvbench.runners.feed import budget, feed, packed
from kvbench.runners.likelihood import logprobs

if TYPE_CHECKING:
    from kvbench.engine.core import Engine


@dataclass(frozen=True)
class Group:
    """Questions that share `prefix`. items: what follows it; their contexts have at least one token each.

    mixed: short questions stand beside long ones in a forward, which costs time and gives each other neighbours.
    """

    prefix: tuple[int, ...]
    items: tuple[Pair, ...]
    mixed: bool = False


def group(pairs: Sequence[Pair], share: bool = True, mixed: bool = False) -> Group:
    """The longest common token prefix taken out of the contexts; `share=False`, or a single question, takes none out."""
    n = common_prefix([p.context for p in pairs]) if share and len(pairs) > 1 else 0
    items = tuple(Pair(p.context[n:], p.continuations, p.merged) for p in pairs)
    return Group(pairs[0].context[:n], items, mixed)


def batches(g: Group, device: torch.device) -> list[list[int]]:
    """Indexes of the questions of each packed forward, shortest first: equal lengths share an attention call. Where they are
    mixed, the longest, the shortest, the second longest, ...
    """
    lengths = [len(item.context) for item in g.items]
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    if g.mixed:
        order = [order[-1 - k // 2] if k % 2 == 0 else order[k // 2] for k in range(len(order))]
    packs = packed([lengths[i] for i in order], budget(device))
    return [[order[i] for i in pack] for pack in packs]


def capacity(groups: Sequence[Group], device: torch.device, page_size: int) -> int:
    """Pages that the largest batch of any group needs: prefix, questions and choices, each with its copied last page."""
    most = 1
    for g in groups:
        shared = pages_for(len(g.prefix), page_size)
        for batch in batches(g, device):
            need = shared
            for item in (g.items[i] for i in batch):
                need += pages_for(len(item.context), page_size) + 1
                need += sum(pages_for(len(c), page_size) + 1 for c in item.continuations if len(c) > 1)
            most = max(most, need)
    return most


def score(engine: Engine, g: Group, chunk: int) -> Iterator[tuple[list[int], list[list[float]], int]]:
    """Batch by batch: indexes of questions, the summed log-probability of each of their choices, tokens computed.

    chunk: most tokens of a sequence in one forward. The prefix's tokens are counted with the first batch.
    """
    computed = len(g.prefix)
    root = engine.add()
    if g.prefix:
        feed(engine, [(root, g.prefix)], chunk, "none")
    for batch in batches(g, engine.model.device):
        items = [g.items[i] for i in batch]
        seqs = [engine.fork(root) for _ in batch]
        last = feed(engine, [(s, item.context) for s, item in zip(seqs, items, strict=True)], chunk, "last")
        firsts = _first_scores(last, items)
        rests, extra = _rest_scores(engine, seqs, items, chunk)
        for seq in seqs:
            engine.free(seq)
        scores = [[a + b for a, b in zip(f, r, strict=True)] for f, r in zip(firsts, rests, strict=True)]
        yield batch, scores, computed + sum(len(item.context) for item in items) + extra
        computed = 0
    engine.free(root)


def _first_scores(last: Sequence[Tensor], items: Sequence[Pair]) -> list[list[float]]:
    """Log-probability of each choice's first token, from the logits of the question's last token."""
    counts = [len(item.continuations) for item in items]
    rows = torch.cat([logits.expand(n, -1) for logits, n in zip(last, counts, strict=True)])
    firsts = torch.tensor([c[0] for item in items for c in item.continuations], device=rows.device)
    flat = logprobs(rows, firsts).tolist()
    out, start = [], 0
    for n in counts:
        out.append(flat[start : start + n])
        start += n
    return out


def _rest_scores(
    engine: Engine, seqs: Sequence[int], items: Sequence[Pair], chunk: int
) -> tuple[list[list[float]], int]:
    """Summed log-probability of each choice's tokens after the first (0.0 for a single token), and tokens computed."""
    sums = [[0.0] * len(item.continuations) for item in items]
    places = [
        (row, choice, c)
        for row, item in enumerate(items)
        for choice, c in enumerate(item.continuations)
        if len(c) > 1
    ]
    for pack in packed([len(c) - 1 for _, _, c in places], budget(engine.model.device)):
        chosen = [places[i] for i in pack]
        forks = [engine.fork(seqs[row]) for row, _, _ in chosen]
        work = [(fork, c[:-1]) for fork, (_, _, c) in zip(forks, chosen, strict=True)]
        for (row, choice, c), logits in zip(chosen, feed(engine, work, chunk, "all"), strict=True):
            targets = torch.tensor(c[1:], device=logits.device)
            sums[row][choice] = float(logprobs(logits, targets).sum())
        for fork in forks:
            engine.free(fork)
    return sums, sum(len(c) - 1 for _, _, c in places)
