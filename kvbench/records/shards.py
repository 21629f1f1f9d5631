"""Shards of a matrix: `kvbench run M --shard N/M` measures one, `kvbench merge` merges them.

Cells are assigned in turn, baselines and candidates separately, so that every shard has some of both. The
cells of one line of ITL over the context stay together, because times of different hosts are never pooled. A
shard's tasks are those whose first cell is its own, and their baseline tasks, wherever their cells are.

The manifest of a shard is that of the whole matrix, plus

    "shard": {"number": 1, "of": 2, "tasks": [keys of the tasks that it measures]}
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import content_hash
from kvbench.matrix.cells import Cell, Task

LINE = 3  # contexts; fewer give no line (`kvbench.stats.regression`)


@dataclass(frozen=True)
class Shard:
    """The number-th shard of `of`, from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"shard {self.number} of {self.of}"


@dataclass(frozen=True)
class Share:
    """A shard with the keys of the tasks that it measures."""

    shard: Shard
    tasks: frozenset[str]

    def to_dict(self, tasks: Iterable[Task]) -> dict[str, Any]:
        """The share as the manifest has it; tasks: all of the matrix."""
        keys = [task.key for task in tasks if task.key in self.tasks]
        return {"number": self.shard.number, "of": self.shard.of, "tasks": keys}


def parse(text: str) -> Shard:
    """`1/2` -> Shard(1, 2). Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        advice = "use N/M with N from 1 to M, as in --shard 1/2"
        raise UsageError(f"--shard {text} is not a shard of a matrix; {advice}.")
    return Shard(number, of)


def units(cells: Sequence[Cell], tasks: Sequence[Task]) -> list[tuple[Cell, ...]]:
    """The cells in groups that stay on one machine: those of a line of ITL over the context; others alone."""
    of_line: dict[str, list[Cell]] = {}
    timed = {cell for task in tasks if task.runner == "latency" for cell in task.cells}
    for cell in cells:
        if cell.id in timed:
            rest = content_hash({key: value for key, value in cell.spec.items() if key != "context"})
            of_line.setdefault(rest, []).append(cell)
    lines = {line[0].id: tuple(line) for line in of_line.values() if len(line) >= LINE}
    joined = {cell.id for line in lines.values() for cell in line}
    return [lines.get(cell.id, (cell,)) for cell in cells if cell.id in lines or cell.id not in joined]


def cells_of(cells: Sequence[Cell], tasks: Sequence[Task], shard: Shard) -> list[Cell]:
    """The cells of a shard, in the order of the matrix. Raises UsageError where it has none."""
    groups, most, own = units(cells, tasks), 0, set[str]()
    for kind in (True, False):
        dealt = [group for group in groups if group[0].is_baseline is kind]
        most = max(most, len(dealt))
        own |= {cell.id for group in dealt[shard.number - 1 :: shard.of] for cell in group}
    if not own:
        raise UsageError(
            f"{shard} has no cell: this matrix gives at most {most} shard{'s' if most > 1 else ''}, because "
            f"cells that differ only in the context stay together; use --shard N/M with M up to {most}."
        )
    return [cell for cell in cells if cell.id in own]


def share_of(cells: Sequence[Cell], tasks: Sequence[Task], shard: Shard) -> Share:
    """The tasks of a shard: those of its cells, and their baselines."""
    own = {cell.id for cell in cells_of(cells, tasks, shard)}
    mine = [task for task in tasks if task.cells[0] in own]
    return Share(shard, frozenset([t.key for t in mine] + [t.baseline for t in mine if t.baseline]))


def outline(share: Share, cells: Sequence[Cell], tasks: Sequence[Task]) -> list[str]:
    """The shard as lines of text: its cells, and its tasks by key; baselines of other shards are marked."""
    own = {cell.id: cell.name or "the only cell" for cell in cells_of(cells, tasks, share.shard)}
    lines = [f"  {share.shard}: {len(own)} of {len(cells)} cells, {len(share.tasks)} of {len(tasks)} tasks"]
    lines += [f"    {cell}  {name}" for cell, name in own.items()]
    for task in tasks:
        if task.key in share.tasks:
            other = "" if task.cells[0] in own else "  (a baseline of its tasks)"
            lines.append(f"    {task.key}  {task.title}{other}")
    return lines
