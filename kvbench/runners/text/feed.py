"""Feeds token lists to an engine: packed over sequences, in pieces of the cell's prefill chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.engines.protocol import Engine, Logits

# Tokens of one packed forward by device type: enough to fill the device, few enough for the logits to fit.
BUDGET = {"cpu": 512, "cuda": 4096}


def budget(device: torch.device) -> int:
    return BUDGET.get(device.type, BUDGET["cpu"])


def packed(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indexes of neighbours whose lengths add up to at most `limit`; a longer one is alone."""
    pack: list[int] = []
    room = limit
    for i, length in enumerate(lengths):
        if pack and length > room:
            yield pack
            pack, room = [], limit
        pack.append(i)
        room -= length
    if pack:
        yield pack


def feed(
    engine: Engine, work: Sequence[tuple[int, Sequence[int]]], chunk: int, logits: Logits
) -> list[Tensor]:
    """Append each sequence's tokens, `chunk` of a sequence a forward, all sequences packed.

    Returns float32 logits a sequence: [n, V] for "all", [1, V] for "last", [0, V] for "none".
    """
    if max(len(tokens) for _, tokens in work) <= chunk:
        return engine.forward(work, logits)
    parts: list[list[Tensor]] = [[] for _ in work]
    for start in range(0, max(len(tokens) for _, tokens in work), chunk):
        rows = [i for i, (_, tokens) in enumerate(work) if len(tokens) > start]
        piece = [(work[i][0], work[i][1][start : start + chunk]) for i in rows]
        for i, out in zip(rows, engine.forward(piece, logits), strict=True):
            parts[i] = [*parts[i], out] if logits == "all" else [out]
    return [torch.cat(part) if len(part) > 1 else part[0] for part in parts]
