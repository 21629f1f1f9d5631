"""What is said of a run that is a share of a matrix, was merged from shares, or was measured on several hosts."""

from __future__ import annotations

from kvbench.machine.same_machine import names
from kvbench.matrix.runners import RUNNERS
from kvbench.records.record import OK
from kvbench.render.labels import Labels
from kvbench.render.numbers import plain
from kvbench.report.model import JudgedRun

_MOST = 4


def scale_out(run: JudgedRun, labels: Labels) -> list[tuple[str, str, str, str]]:
    """(tone, title, what was found, what to do about it) of each notice."""
    found = []
    if share := run.manifest.shard:
        found.append((
            "info", str(share.shard).capitalize(),
            f"{len(share.tasks)} of {len(run.manifest.tasks)} tasks are measured here; what others measure is not evaluated, and "
            "nothing here is a pass of the whole.",
            "Put the shards together: kvbench merge RUN RUN... --out DIR.",
        ))  # fmt: skip
    if differing := run.manifest.merged and run.manifest.merged.differences:
        more = f" And {len(differing) - _MOST} more." if len(differing) > _MOST else ""
        said = " ".join(plain(sentence, 300) for sentence in differing[:_MOST])
        found.append(
            (
                "warn",
                "Shards differ",
                f"{said}{more}",
                "Find out why before the numbers are compared: a task is the same wherever it runs.",
            )
        )
    cells: dict[str, list[str]] = {}
    for record, task in run.done():
        if record.status == OK and record.runner in RUNNERS and RUNNERS[record.runner].timed:
            for host in names([record.environment]):
                cells.setdefault(host, []).extend(task.cells)
    if len(cells) > 1:
        of_host = "; ".join(
            f"{plain(h, 80)}: {_cells(own, labels)}" for h, own in list(cells.items())[:_MOST]
        )
        more = f"; and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
        found.append((
            "warn", "Times of several hosts",
            f"Times stand side by side that were taken on different machines; none of them are joined. {of_host}{more}.",
            "To compare times, measure them on one host.",
        ))  # fmt: skip
    return found


def _cells(ids: list[str], labels: Labels) -> str:
    own = [cell for cell in labels.cells if cell in set(ids)]
    name = labels.cell(own[0]).text
    return f"{name} and {len(own) - 1} more cells" if len(own) > 1 else name
