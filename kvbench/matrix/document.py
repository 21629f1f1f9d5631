"""A YAML file as plain data with the place of each part, and the mistakes in it, raised together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvbench.errors import UsageError

DataPath = tuple[str | int, ...]
Mark = tuple[int, int]  # line, column; both from 1


class Fault(NamedTuple):
    """One mistake. line, column: its order in the file; 0, 0 for an override of the command line. code: a
    stable word (`unknown_key`, `wrong_type`, `not_accepted`). path: which part of the file."""

    line: int
    column: int
    where: str
    sentence: str
    code: str
    path: DataPath = ()


class ConfigError(UsageError):
    """Every mistake of a matrix or gate file, a line each: `file:line:column: sentence`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(f"{fault.where}: {fault.sentence}" for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class Document:
    """Plain data (dict with text keys, list, str, int, float, bool, None) and the place of each part of it.

    name: the file's path. sha: sha256 of the bytes, hex. marks, keys: path -> place of the value, of its key.
    faults: mistakes that the loader stepped over; broken: paths whose value it could not read (they hold
    None). origins: path that an override set -> the override."""

    name: str
    data: Any
    sha: str
    marks: Mapping[DataPath, Mark]
    keys: Mapping[DataPath, Mark]
    faults: tuple[Fault, ...] = ()
    broken: frozenset[DataPath] = frozenset()
    origins: Mapping[DataPath, str] = field(default_factory=dict)

    def mark(self, path: DataPath, key: bool = False) -> Mark:
        """Place of the value at `path` (with `key` its key), or of a known parent; 0, 0 for an override."""
        if key and path in self.keys and path not in self.origins:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return 0, 0
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return 1, 1

    def where(self, path: DataPath, key: bool = False) -> str:
        """`file:line:column`, or the text of the override."""
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
    """The mistakes of one document, raised together."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.faults = list(document.faults)

    def add(self, path: DataPath, sentence: str, code: str, key: bool = False) -> None:
        """`key`: point at the key, not at its value. A value that the loader refused gets no second fault."""
        fault = Fault(*self.document.mark(path, key), self.document.where(path, key), sentence, code, path)
        if path not in self.document.broken and fault not in self.faults:
            self.faults.append(fault)

    def raise_if_any(self) -> None:
        if self.faults:
            raise ConfigError(sorted(self.faults, key=lambda fault: fault[:2]))
