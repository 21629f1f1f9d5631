"""A matrix file becomes frozen cells and the tasks that measure them.

    load(path) -> yaml.read -> overrides.apply -> parse.read -> expand.expand -> select.select ->
    tasks.tasks_of -> Matrix

Reads only the file and the scale files that it names; the caller passes the machine and the digests in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvbench.errors import UsageError
from kvbench.machine.host import Host
from kvbench.matrix import overrides as overriding
from kvbench.matrix import parse
from kvbench.matrix import yaml as yamlstrict
from kvbench.matrix.cells import Cell, Task
from kvbench.matrix.document import Document, Problems
from kvbench.matrix.expand import expand
from kvbench.matrix.select import select as select_cells
from kvbench.matrix.tasks import FingerprintData, FingerprintModel, tasks_of

__all__ = ["Host", "Matrix", "load"]


@dataclass(frozen=True)
class Matrix:
    """gate: the gate file's path. source: the file's data with the overrides. sha: sha256 of the file."""

    name: str
    path: Path | None
    cells: tuple[Cell, ...]
    tasks: tuple[Task, ...]
    gate: Path | None
    source: Mapping[str, Any]
    sha: str


def load(
    path: Path | str,
    overrides: Sequence[str] = (),
    select: str | None = None,
    host: Host = Host(),  # noqa: B008 - frozen
    fingerprint_model: FingerprintModel = lambda spec: "",
    fingerprint_data: FingerprintData = lambda name, split: "",
    sizes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Matrix:
    """Read, check and expand the matrix at `path`.

    overrides: `a.b=value` of `--set`. select: an expression of `-k`; cells keep their names in the whole
    matrix. fingerprint_model(spec), fingerprint_data(name, split): digests for the task keys. sizes: runner
    -> options that replace the file's own. Raises ConfigError with every mistake of the file, UsageError for
    an unknown name or expression."""
    path = Path(path)
    document = overriding.apply(yamlstrict.read(path), overrides)
    problems = Problems(document)
    read, sound = parse.read(document, problems)
    cells = expand(read, host, problems, path.parent) if sound else ()
    gate = path.parent / read.gate if read.gate else None
    if gate and not _is_file(gate):
        sentence = f"the gate file {gate} does not exist; its path is relative to the matrix file."
        problems.add(("gate",), sentence, "missing_file")
    problems.raise_if_any()
    if select is not None:
        cells = select_cells(cells, select)
    tasks = tasks_of(
        cells,
        {name: {**options, **sizes.get(name, {})} for name, options in read.runners.items()},
        host,
        lambda spec: _located(document, spec["model"], lambda: fingerprint_model(spec)),
        lambda name, split: _located(document, name, lambda: fingerprint_data(name, split)),
    )
    return Matrix(read.name, path, cells, tasks, gate, document.data, document.sha)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _located(document: Document, name: str, fingerprint: Callable[[], str]) -> str:
    """An unknown model or data name is a mistake in the matrix: its place is added to the message."""
    try:
        return fingerprint()
    except UsageError as e:
        raise UsageError(f"{document.where(document.find(name))}: {e}") from None
