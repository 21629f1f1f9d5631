"""What the shell completes: files by their kind, and known names. Each function takes the start of a word and
returns the words that begin with it. Fast, since it runs at every press of the tab key."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_HEAD = 65_536  # bytes; the sections of a matrix or a gate begin before


def matrices(incomplete: str) -> list[str]:
    return _paths(incomplete, lambda path: _has(path, r"^runners:"))


def gates(incomplete: str) -> list[str]:
    return _paths(incomplete, lambda path: _has(path, r"^checks:"))


def policies(incomplete: str) -> list[str]:
    """Matrices and gates."""
    return _paths(incomplete, lambda path: _has(path, r"^(runners|checks):"))


def runs(incomplete: str) -> list[str]:
    """Folders that `kvbench run` wrote, and folders that may hold one."""
    return _paths(incomplete, lambda path: False)


def kv_formats(incomplete: str) -> list[str]:
    from kvbench.formats.kv import KV_FORMATS

    return _names(incomplete, [name for name, fmt in KV_FORMATS.items() if fmt.quantized])


def models(incomplete: str) -> list[str]:
    """Names that kvbench knows, model folders and .gguf files."""
    from kvbench.models.catalog import ALIASES, CONFIGS

    named = _names(incomplete, [*ALIASES, *CONFIGS])
    return [*named, *_paths(incomplete, lambda path: path.suffix == ".gguf")]


def corpora(incomplete: str) -> list[str]:
    from kvbench.data.corpora import NAMED
    from kvbench.data.questions import TASKS

    return _names(incomplete, [*NAMED, *TASKS])


def _names(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> list[str]:
    """Paths that begin with the word: a folder with a slash behind it (none behind a run, a model or a folder
    that ends there), a file where it is wanted."""
    head, _, tail = incomplete.rpartition("/")
    folder = Path(f"{head}/").expanduser() if head or incomplete.startswith("/") else Path(".")
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            hidden = path.name.startswith(".") and not tail.startswith(".")
            if path.name.startswith(tail) and not hidden:
                found += _shown(path, wanted)
    return sorted(f"{head}/{name}" if "/" in incomplete else name for name in found)


def _shown(path: Path, wanted: Callable[[Path], bool]) -> list[str]:
    with suppress(OSError):
        if path.is_dir():
            ends = any((path / name).is_file() for name in ("run.json", "config.json"))
            return [path.name if ends else f"{path.name}/"]
        return [path.name] if wanted(path) else []
    return []


def _has(path: Path, section: str) -> bool:
    if path.suffix not in (".yaml", ".yml"):
        return False
    with path.open(encoding="utf-8", errors="replace") as f:
        return re.search(section, f.read(_HEAD), re.M) is not None
