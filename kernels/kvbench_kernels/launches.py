"""Which kernels were launched, by name: every wrapper says so right after its launch, and whoever records, hears it.

A CUDA graph launches at its capture; a replay runs the same kernels again without a word, so count replays beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """name: the kernel's, as a profiler shows it; layer: the one at work, or None; compiled: what Triton made of it;
    splits: programs along a sequence that its grid had, of a paged decode; product: the (M, N, K) that it is for, of an
    FP8 linear layer.
    """

    name: str
    layer: int | None
    compiled: Any = None
    splits: int | None = None
    product: tuple[int, int, int] | None = None


_heard: list[Launch] | None = None
_layer: int | None = None
_product: tuple[int, int, int] | None = None


def launched(name: str, compiled: Any = None, splits: int | None = None) -> None:
    """Called by a wrapper, with what the launch returned."""
    if _heard is not None:
        _heard.append(Launch(name, _layer, compiled, splits, _product))


def at_layer(layer: int | None) -> None:
    """Launches from here on belong to `layer`."""
    global _layer
    _layer = layer


@contextmanager
def product(m: int, n: int, k: int) -> Iterator[None]:
    """Launches inside the `with` are for x [m, k] times a weight [n, k]."""
    global _product
    _product = m, n, k
    try:
        yield
    finally:
        _product = None


@contextmanager
def record() -> Iterator[list[Launch]]:
    """The launches inside the `with`, in order. A recording inside another is heard by both."""
    global _heard
    outer, _heard = _heard, []
    mine = _heard
    try:
        yield mine
    finally:
        _heard = outer
        if outer is not None:
            outer.extend(mine)
