"""A YAML file as plain data that remembers where each part stands, and complaints about it, raised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvbench.errors import UsageError
from kvbench.text import suggestion

DataPath = tuple[str | int, ...]
Mark = tuple[int, int]  # line, column; both from 1


class Fault(NamedTuple):
    """One complaint; line and column put the complaints in order (0, 0 for an override of the command line)."""

    line: int
    column: int
    where: str
    sentence: str


@dataclass(frozen=True)
class Document:
    """Plain data (dict with text keys, list, str, int, float, bool, None) and where each part of it stands.

    name: what messages call it, a file's path. sha: sha256 of the bytes, hex. marks, keys: the mark of a value, and
    of the key that names it, by path. faults: what the loader found wrong and could step over; broken: paths whose
    value it could not make (None stands there). origins: paths set by an override, with the words of the override.
    """

    name: str
    data: Any
    sha: str
    marks: Mapping[DataPath, Mark]
    keys: Mapping[DataPath, Mark]
    faults: tuple[Fault, ...] = ()
    broken: frozenset[DataPath] = frozenset()
    origins: Mapping[DataPath, str] = field(default_factory=dict)

    def mark(self, path: DataPath, key: bool = False) -> Mark:
        """Line and column of the value at `path` (of its key with `key`), or of its nearest known parent.

        (0, 0) for what an override set.
        """
        if key and path in self.keys and path not in self.origins:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return 0, 0
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return 1, 1

    def where(self, path: DataPath, key: bool = False) -> str:
        """`file:line:column`, or the override's own words."""
        line, column = self.mark(path, key)
        if line:
            return f"{self.name}:{line}:{column}"
        return next(
            self.origins[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.origins
        )

    def find(self, value: Any) -> DataPath:
        """The first path whose value is the scalar `value`; () when there is none."""

        def walk(here: Any, path: DataPath) -> Iterator[DataPath]:
            if isinstance(here, dict | list):
                for key, part in here.items() if isinstance(here, dict) else enumerate(here):
                    yield from walk(part, (*path, key))
            elif type(here) is type(value) and here == value:
                yield path

        return next(walk(self.data, ()), ())


class Problems:
    """Complaints about one document, raised together."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._faults = list(document.faults)

    def __len__(self) -> int:
        return len(self._faults)

    def add(self, path: DataPath, sentence: str, key: bool = False) -> None:
        """`key`: point at the key, not at its value. A value the loader already refused draws no second complaint."""
        fault = Fault(*self._document.mark(path, key), self._document.where(path, key), sentence)
        if path not in self._document.broken and fault not in self._faults:
            self._faults.append(fault)

    def raise_if_any(self) -> None:
        if self._faults:
            raise UsageError(
                "\n".join(f"{f.where}: {f.sentence}" for f in sorted(self._faults, key=lambda f: f[:2]))
            )


def unknown_key(key: str, section: str, accepted: Sequence[str]) -> str:
    """The sentence for a key that `section` does not have."""
    return f"{key} is not a key of {section}; accepted: {', '.join(accepted)}.{suggestion(key, accepted)}"
