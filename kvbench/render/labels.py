"""Names of cells as a person reads them, short enough for a table and never ambiguous."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import short
from kvbench.matrix.cells import Cell, Task
from kvbench.records.run import Run
from kvbench.render.numbers import one_line, plain

_PART_LIMIT = 60  # characters of one key's value in a label; the table of cells has the whole value


@dataclass(frozen=True)
class Label:
    """Where something was measured. parts: (key, value) pairs, `kv_format` first; text: the same as one line;
    cells: the ids it stands for (more than one when cells share a task); baseline: whether it is one.
    """

    text: str
    parts: tuple[tuple[str, str], ...]
    cells: tuple[str, ...]
    baseline: bool

    def without(self, *keys: str) -> str:
        """The text with some keys left out: the name of a line that goes over them."""
        parts = (part for part in self.parts if part[0] not in keys)
        return " · ".join(value if key in ("", "kv_format") else f"{key} {value}" for key, value in parts)


class Labels:
    """The labels of one run, from its cells and tasks."""

    def __init__(self, run: Run) -> None:
        self.cells = run.cells
        # Where some weights are FP8, `native` alone would be read of the weights.
        self._cache = (
            "" if {c.spec.get("weights") for c in self.cells.values()} <= {None, "native"} else "KV "
        )
        self._keys = _keys(self.cells.values())
        self._order = {cell: i for i, cell in enumerate(self.cells)}
        texts = Counter(self._text(self._parts(cell, self._keys)) for cell in self.cells)
        self._ambiguous = {text for text, count in texts.items() if count > 1}
        self._runners = tuple(dict.fromkeys(task.runner for task in run.tasks))
        self._shared: dict[tuple[str, str], Task] = {}
        for task in run.tasks:
            for cell in task.cells:
                self._shared.setdefault((task.runner, cell), task)

    def cell(self, cell: str | None) -> Label:
        """The label of one cell; an unknown id is shown as it is, None as "whole run"."""
        if not cell or cell not in self.cells:
            text = one_line(cell or "whole run", _PART_LIMIT)
            return Label(text, (("", text),), (cell,) if cell else (), False)
        return self._label(cell, self._keys, (cell,))

    def subject(self, runner: str, cell: str) -> Label:
        """What a runner measured with `cell`: only the keys it depends on, and all cells it stands for."""
        task = self._shared.get((runner, cell))
        if task is None or cell not in self.cells:
            return self.cell(cell)
        keys = [key for key in self._keys if key in task.spec]
        return self._label(task.cells[0], keys, task.cells)

    def across(self, cell: str, key: str) -> Label:
        """All cells that differ from `cell` in nothing but `key`, as one."""
        if cell not in self.cells:
            return self.cell(cell)
        spec = self.cells[cell].spec
        cells = [
            name
            for name, other in self.cells.items()
            if all(other.spec.get(k) == v for k, v in spec.items() if k != key)
        ]
        return self._label(cell, [k for k in self._keys if k != key], tuple(cells))

    def places(self, cells: Sequence[str]) -> tuple[Label, ...]:
        """The labels of several cells; one for all cells that share some task, if all are among them."""
        left = dict.fromkeys(cells)
        places = []
        for cell in cells:
            if cell in left:
                shared = [self.subject(runner, cell) for runner in self._runners]
                whole = [x for x in shared if len(x.cells) > 1 and left.keys() >= set(x.cells)]
                places.append(max(whole, key=lambda x: len(x.cells), default=self.cell(cell)))
                for one in places[-1].cells:
                    left.pop(one)
        return tuple(places) or (self.cell(None),)

    def unnamed(self, sentence: str, cells: Sequence[str]) -> str:
        """A sentence without the name of the cell beside it, so that equal findings are equal."""
        if not cells or cells[0] not in self.cells:
            return sentence
        name = re.escape(self.cells[cells[0]].name)
        return re.sub(rf"^{name}: | on {name}( \(and \d+ more cells?\))?", "", sentence)

    def task(self, task: Task) -> Label:
        return self.subject(task.runner, task.cells[0]) if task.cells else self.cell(None)

    def rank(self, label: Label) -> tuple[int, int, int]:
        """Sort key: cells in the matrix's order, each baseline above the cells that are compared with it."""
        last = len(self._order)
        first = min((self._order.get(cell, last) for cell in label.cells), default=last)
        baselines = (self.cells[cell].baseline for cell in label.cells if cell in self.cells)
        group = min((self._order.get(baseline, last) for baseline in baselines), default=last)
        return group, 0 if label.baseline else 1, first

    def _label(self, cell: str, keys: Iterable[str], cells: tuple[str, ...]) -> Label:
        parts = self._parts(cell, keys)
        text = self._text(parts)
        if text in self._ambiguous and len(cells) == 1:
            parts, text = (*parts, ("id", cell)), f"{text} · {cell}"
        return Label(text, parts, cells, self.cells[cell].baseline == cell)

    def _parts(self, cell: str, keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
        spec = self.cells[cell].spec
        return tuple(
            (one_line(key), f"{self._cache if key == 'kv_format' else ''}{_value(spec[key])}")
            for key in keys
            if spec.get(key) is not None
        )

    @staticmethod
    def _text(parts: Iterable[tuple[str, str]]) -> str:
        return " · ".join(value if key == "kv_format" else f"{key} {value}" for key, value in parts)


def _keys(cells: Iterable[Cell]) -> list[str]:
    keys = ["kv_format"]
    for cell in cells:
        keys += [key for key in cell.varied if key not in keys]
    return keys


def _value(value: Any) -> str:
    """One value of a cell; a whole number without separators, as it was written in the matrix."""
    if isinstance(value, Mapping):  # scales by side or by layer
        return one_line(short(value), _PART_LIMIT)
    return str(value) if type(value) is int else plain(value, _PART_LIMIT)
