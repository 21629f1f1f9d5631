"""A GPU leased by one kvbench at a time, so that two runs on a machine do not measure on one.

A lease is a file lock in kvbench's cache folder; it dies with its process. It binds only who asks for it: other programs on the GPU are
seen by the latency runner, and not kept away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from kvbench.files import cache_dir


@contextmanager
def leased(uuid: str, seconds: float) -> Iterator[bool]:
    """Whether the GPU is this process's now; tried for so many seconds. Given back at the end."""
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
