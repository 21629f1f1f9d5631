"""Which kernels were launched, by name: evidence that a kernel ran, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_recorders: list[list[str]] = []


@contextmanager
def record() -> Iterator[list[str]]:
    """Names of the kernels launched inside the block, in order. Blocks may be nested; each sees all that is in it."""
    names: list[str] = []
    _recorders.append(names)
    try:
        yield names
    finally:
        # By identity: two recorders that saw the same are equal lists.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not names]


def launched(name: str) -> None:
    """Called by every wrapper right after a launch, with the kernel's function name."""
    for names in _recorders:
        names.append(name)
