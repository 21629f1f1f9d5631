"""How a text repeats itself: distinct n-grams, exact loops, and the token from which it says nothing new. Pure.

Positions count from 0 in what was generated; "none" is None, and whoever reports it says how long the text was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_PERIOD = 128
COPIES = 3  # a unit that stands there twice is a figure of speech
SHORTEST = 12  # tokens of a loop: `. . .` and a table's rule are none

GRAM = 4
STALE = 0.9  # share of repeated tokens from which a text's end says nothing new
SHORTEST_TAIL = 32


@dataclass(frozen=True)
class Loop:
    """tokens[onset : onset + length] is one unit of `period` tokens over and over; onset: its first copy's first token."""

    onset: int
    period: int
    length: int


def distinct_ngrams(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams over all n-grams; None for a text shorter than one."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def longest_loop(tokens: Sequence[int]) -> Loop | None:
    """The loop of most tokens: at least `COPIES` copies and `SHORTEST` tokens; of equal ones the smallest period, then the
    earliest. The last copy may be cut off."""
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // COPIES) + 1):
        start = period
        for i in range(period, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - period]:
                continue
            length = i - start + period
            long_enough = length >= max(COPIES * period, SHORTEST)
            if long_enough and (best is None or length > best.length):
                best = Loop(start - period, period, length)
            start = i + 1
    return best


def degeneration_onset(tokens: Sequence[int]) -> int | None:
    """The token from which the text only repeats itself to its end; None where it does not.

    A token is repeated when the `GRAM` tokens that end with it stood in the text before. The onset is the earliest repeated
    token with at least `STALE` of it and all that follow repeated, `SHORTEST_TAIL` tokens or more. Loops of any period are
    found, and those that vary a little.
    """
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(tokens)
    for i in range(GRAM - 1, len(tokens)):
        gram = tuple(tokens[i - GRAM + 1 : i + 1])
        repeated[i] = gram in seen
        seen.add(gram)
    onset, count = None, 0
    for i in range(len(tokens) - 1, -1, -1):
        count += repeated[i]
        tail = len(tokens) - i
        if repeated[i] and tail >= SHORTEST_TAIL and count >= STALE * tail:
            onset = i
    return onset


def first_divergence(tokens: Sequence[int], native: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the texts is over; None where they are equal."""
    for i, (a, b) in enumerate(zip(tokens, native, strict=False)):
        if a != b:
            return i
    return None if len(tokens) == len(native) else min(len(tokens), len(native))
