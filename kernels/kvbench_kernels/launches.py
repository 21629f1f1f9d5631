"""A record of launched kernels. Every wrapper reports its launch; the caller owns the record.

A CUDA graph reports its kernels when it is captured and not when it is replayed, so count replays too."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Product = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    name: as a profiler shows it; layer: its attention layer; compiled: what Triton compiled; splits: programs
    along a sequence of a paged decode; product: (M, N, K) of an FP8 linear layer.
    """

    name: str
    layer: int | None
    compiled: Any = None
    splits: int | None = None
    product: Product | None = None


@dataclass(slots=True)
class Recording:
    """The launches of one `record()`, in order, and what the next one belongs to."""

    layer: int | None = None
    product: Product | None = None
    launches: list[Launch] = field(default_factory=list)


# Of this thread; None if nobody records.
_current: ContextVar[Recording | None] = ContextVar("kvbench_launches", default=None)


def launched(name: str, compiled: Any = None, splits: int | None = None) -> None:
    """Report a launch. compiled: what the launch returned."""
    if (recording := _current.get()) is not None:
        recording.launches.append(Launch(name, recording.layer, compiled, splits, recording.product))


def at_layer(layer: int | None) -> None:
    """Launches from here on belong to attention layer `layer`, or to none."""
    if (recording := _current.get()) is not None:
        recording.layer = layer


@contextmanager
def product(m: int, n: int, k: int) -> Iterator[None]:
    """Launches inside the `with` belong to the product of x [m, k] and a weight [n, k]."""
    recording = _current.get() or Recording()
    recording.product = m, n, k
    try:
        yield
    finally:
        recording.product = None


@contextmanager
def record() -> Iterator[list[Launch]]:
    """The launches of this thread inside the `with`, in order. An outer recording gets them too."""
    outer = _current.get()
    mine = Recording() if outer is None else Recording(outer.layer, outer.product)
    token = _current.set(mine)
    try:
        yield mine.launches
    finally:
        _current.reset(token)
        if outer is not None:
            outer.launches.extend(mine.launches)
