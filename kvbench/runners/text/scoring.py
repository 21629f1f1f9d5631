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

from kvbench.formats.kv import pages_for
from kvbench.runners.text.encode import Pair, common_prefix
from kvbench.runners.text.feed import budget, feed, packed
from kvbench.runners.text.likelihood import logprobs

if TYPE_CHECKING:
    from kvbench.engines.protocol import Engine


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
    """Pages that the largest batch of any group needs: prefix, questions and the choices of a pack, each with its copied last page."""
    most = 1
    for g in groups:
        shared = pages_for(len(g.prefix), page_size)
        for batch in batches(g, device):
            items = [g.items[i] for i in batch]
            rests = [len(c) for item in items for c in item.continuations if len(c) > 1]
            packs = packed([n - 1 for n in rests], budget(device))
            own = sum(pages_for(len(item.context), page_size) + 1 for item in items)
            beside = max((sum(pages_for(rests[i], page_size) + 1 for i in pack) for pack in packs), default=0)
            most = max(most, shared + own + beside)
    return most


@dataclass(frozen=True)
class Said:
    """What the model says of one choice: its summed log-probability, and whether greedy decoding would have written it."""

    logprob: float
    greedy: bool

    def __add__(self, more: Said) -> Said:
        return Said(self.logprob + more.logprob, self.greedy and more.greedy)


NOTHING = Said(0.0, True)


def score(engine: Engine, g: Group, chunk: int) -> Iterator[tuple[list[int], list[list[float]], int]]:
    """As `say`, with the summed log-probabilities alone."""
    for batch, said, computed in say(engine, g, chunk):
        yield batch, [[choice.logprob for choice in own] for own in said], computed


def say(engine: Engine, g: Group, chunk: int) -> Iterator[tuple[list[int], list[list[Said]], int]]:
    """Batch by batch: indexes of questions, what the model says of each of their choices, tokens computed.

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
        firsts = _firsts(last, items)
        rests, extra = _rests(engine, seqs, items, chunk)
        for seq in seqs:
            engine.free(seq)
        said = [[a + b for a, b in zip(f, r, strict=True)] for f, r in zip(firsts, rests, strict=True)]
        yield batch, said, computed + sum(len(item.context) for item in items) + extra
        computed = 0
    engine.free(root)


def _firsts(last: Sequence[Tensor], items: Sequence[Pair]) -> list[list[Said]]:
    """Of each choice's first token, from the logits of the question's last token."""
    counts = [len(item.continuations) for item in items]
    rows = torch.cat([logits.expand(n, -1) for logits, n in zip(last, counts, strict=True)])
    firsts = torch.tensor([c[0] for item in items for c in item.continuations], device=rows.device)
    best = torch.cat([logits.argmax(-1).expand(n) for logits, n in zip(last, counts, strict=True)]) == firsts
    flat = [Said(*own) for own in zip(logprobs(rows, firsts).tolist(), best.tolist(), strict=True)]
    out, start = [], 0
    for n in counts:
        out.append(flat[start : start + n])
        start += n
    return out


def _rests(
    engine: Engine, seqs: Sequence[int], items: Sequence[Pair], chunk: int
) -> tuple[list[list[Said]], int]:
    """Of each choice's tokens after the first (`NOTHING` for a single token), and tokens computed."""
    sums = [[NOTHING] * len(item.continuations) for item in items]
    places = [
        (row, choice, c)
        for row, item in enumerate(items)
        for choice, c in enumerate(item.continuations)
        if len(c) > 1
    ]
    for pack in packed([len(c) - 1 for _, _, c in places], budget(engine.model.device)):
        chosen = [places[i] for i in pack]
        forks = [engine.fork(seqs[row]) for row, _, _ in chosen]
        longest = max(len(c) for _, _, c in chosen) - 1
        for start in range(0, longest, chunk):  # the logits of a long text are more than a device holds
            due = [i for i, (_, _, c) in enumerate(chosen) if len(c) - 1 > start]
            ends = {i: min(start + chunk, len(chosen[i][2]) - 1) for i in due}
            logits = engine.forward([(forks[i], chosen[i][2][start : ends[i]]) for i in due], "all")
            for i, own in zip(due, logits, strict=True):
                row, choice, c = chosen[i]
                targets = torch.tensor(c[start + 1 : ends[i] + 1], device=own.device)
                greedy = bool((own.argmax(-1) == targets).all())
                sums[row][choice] += Said(float(logprobs(own, targets).sum()), greedy)
        for fork in forks:
            engine.free(fork)
    return sums, sum(len(c) - 1 for _, _, c in places)
