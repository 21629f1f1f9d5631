"""Leases a GPU to one kvbench process at a time, so that two runs do not measure on the same GPU.

A lease is a file lock in kvbench's cache folder that ends with its process. Other programs can still use the
GPU; the latency runner detects them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from kvbench.files import cache_dir


@contextmanager
def leased(uuid: str, seconds: float) -> Iterator[bool]:
    """Whether the lease was acquired within so many seconds. Released at the end."""
    folder = cache_dir() / "leases"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock")
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
