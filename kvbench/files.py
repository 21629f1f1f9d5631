"""Where kvbench keeps what can be made again, and sha256 of files, remembered by (path, size, mtime)."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError


def cache_dir() -> Path:
    """KVBENCH_CACHE_DIR, else kvbench/ under XDG_CACHE_HOME, else ~/.cache/kvbench. Safe to delete."""
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


def content_hash(data: Any) -> str:
    """sha256 (first 24 hex digits) of canonical JSON: the order of keys does not count."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def write_json(path: Path, data: Any) -> None:
    """Write `data` as `write_file` does.

    NaN and infinities are written as the bare words NaN, Infinity and -Infinity, as Python's own JSON does,
    and read back as floats: a NaN must reach the gate as a NaN.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"{json.dumps(data, ensure_ascii=False, indent=1)}\n".encode())


def write_file(path: Path, content: str | bytes) -> Path:
    """Write with a temp file, fsync and rename: a reader sees the old file or the new one.

    Lone surrogates in text (from a broken file name), which UTF-8 does not have, become `?`.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    return path


_DELETE = "delete that file and run the matrix again to measure it anew"


def read_json(path: Path, advice: str = _DELETE, *, unique: bool = False) -> Any:
    """The data of a JSON file. Raises UsageError for a missing, unreadable or invalid file.

    advice: the next step that the error names. unique: a duplicate key is an error too, else the last counts.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique if unique else None)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a run directory that `kvbench run` wrote.") from None
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}); check the path.") from None
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not valid JSON ({e}); {advice}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.80} is a duplicate in its mapping")
        found[key] = value
    return found
