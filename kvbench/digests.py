"""Where kvbench keeps what can be made again, and sha256 of files, remembered by (path, size, mtime)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvbench.cells import content_hash
from kvbench.errors import UsageError
from kvbench.record import read_json, write_json


def cache_dir() -> Path:
    """KVBENCH_CACHE_DIR, else kvbench/ under XDG_CACHE_HOME, else ~/.cache/kvbench. Safe to delete at any time."""
    own = os.environ.get("KVBENCH_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvbench"


def file_sha256(path: Path) -> str:
    """sha256 of the file's bytes, in hex. Read once: the digest is remembered until size or mtime changes."""
    try:
        path = path.resolve(strict=True)
        stat = path.stat()
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}); check the path.") from None
    note = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    memo = cache_dir() / "digests" / f"{content_hash(note)}.json"
    try:
        return str(read_json(memo)["sha256"])
    except (UsageError, KeyError, TypeError):
        pass  # not remembered, or a damaged note: read the file
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    write_json(memo, {**note, "sha256": digest})
    return digest
