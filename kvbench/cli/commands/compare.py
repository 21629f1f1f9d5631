"""`kvbench compare` and `kvbench history`: stored runs against the first, and over time."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit

from kvbench.cli import completion, options
from kvbench.cli.output import DAMAGED, NOTHING_WRITTEN, handled, show, unreadable
from kvbench.errors import UsageError

_FIRST = "Run directories; the first is the reference"
_ORDERED = "Run directories, or a folder of them; ordered by the time they were made"


def compare(
    runs: Annotated[list[Path], Argument(metavar="A B [C ...]", help=_FIRST, autocompletion=completion.runs)],
    k: options.Select = None,
    only: options.Only = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    margin_pct: options.Margin = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
    markdown: options.Markdown = None,
    html: options.Html = None,
) -> None:
    """Compare stored runs with the first one, from their raw samples, without a model. Refuses runs of
    different work.

    Exits 0 when nothing is worse, 1 when something is (or a run is invalid on its own), 2 when the runs
    cannot be compared, 3 when something could not be evaluated, 4 when there is too little data to decide.
    """
    with handled(NOTHING_WRITTEN):
        from kvbench.compare.two_runs import compare as compare_runs
        from kvbench.report.compare import two_runs as pages

        if len(runs) < 2:
            raise UsageError(f"compare needs two runs or more, got {len(runs)}; name the reference first.")
        _check_options(only, margin_pct, markdown, html)
        # A, B, ... Z, A1, B1, ...
        found = [_stored(p, chr(ord("A") + i % 26) + str(i // 26 or "")) for i, p in enumerate(runs)]
        chosen = _chosen_cells(found, k)
        result, paths = _written(
            runs[0].parent, lambda: compare_runs(found, chosen, only, margin_pct), pages, markdown, html
        )
        if json_:
            show(True, pages.as_json(result), "")
        else:
            pages.show(result, paths, quiet=quiet)
        raise Exit(result.exit_code)


def history(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help=_ORDERED, autocompletion=completion.runs)],
    k: options.Select = None,
    only: options.Only = [],  # noqa: B006
    margin_pct: options.Margin = None,
    json_: options.Json = False,
    markdown: options.Markdown = None,
    html: options.Html = None,
) -> None:
    """Show the values of many stored runs over time, and where `kvbench compare` would report a change.

    Exits 0 whatever changed; 2 for folders that are not runs.
    """
    with handled(NOTHING_WRITTEN):
        from kvbench.compare.history import history as history_of
        from kvbench.report.compare import timeline as pages

        _check_options(only, margin_pct, markdown, html)
        found = [_stored(path, "") for path in _folders(runs)]
        found.sort(key=lambda run: (run.run.manifest.created_at, run.path))
        named = [replace(run, name=f"run {i}") for i, run in enumerate(found, start=1)]
        chosen = _chosen_cells(named, k)
        result, paths = _written(
            runs[0], lambda: history_of(named, chosen, only, margin_pct), pages, markdown, html
        )
        if json_:
            show(True, pages.as_json(result), "")
        else:
            pages.show(result, paths)


def _written(
    folder: Path, compared: Callable[[], Any], pages: Any, markdown: Path | None, html: Path | None
) -> tuple[Any, list[Path]]:
    """The result, and the files written of it. Raises UsageError for records that cannot be read."""
    from kvbench.files import write_file

    try:
        result = compared()
        made = ((markdown, pages.as_markdown), (html, pages.as_html))
        texts = [(path, make(result)) for path, make in made if path]
    except DAMAGED as e:
        raise unreadable(folder, e) from e
    return result, [write_file(path, text) for path, text in texts]


def _folders(given: Sequence[Path]) -> list[Path]:
    """Each given run, and each run inside a given folder that is not a run itself; each once."""
    found: dict[Path, Path] = {}
    for path in given:
        is_run = (path / "run.json").is_file()
        inside = [path] if is_run else sorted(p.parent for p in path.glob("*/run.json"))
        if not inside:
            raise UsageError(
                f"{path} is not a run and holds none; give folders that `kvbench run` printed, or the folder "
                "that they are in."
            )
        for one in inside:
            found.setdefault(one.resolve(), one)
    if len(found) < 2:
        raise UsageError(f"history needs two runs or more, got {len(found)}.")
    return list(found.values())


def _stored(path: Path, name: str) -> Any:
    """The run in a folder. Raises UsageError for a folder that is not a run."""
    from kvbench.compare.pairing import Stored
    from kvbench.records.run import RunDir

    return Stored(name, str(path), RunDir(path).load())


def _chosen_cells(runs: Sequence[Any], expression: str | None) -> list[Collection[str] | None]:
    """The ids of each run's cells for which -k holds, with baselines; UsageError if the first has none."""
    from kvbench.matrix.cells import CELL_KEYS
    from kvbench.matrix.select import select

    if expression is None:
        return [None] * len(runs)
    found: list[Collection[str] | None] = []
    for run in runs:
        cells = [replace(cell, spec={**CELL_KEYS, **cell.spec}) for cell in run.run.cells.values()]
        try:
            found.append({cell.id for cell in select(cells, expression)})
        except UsageError:
            if not found:
                raise
            found.append(())
    return found


def _check_options(only: Sequence[str], margin: float | None, *outputs: Path | None) -> None:
    """Raises UsageError for an unknown metric, a margin out of range, or a file that cannot be written."""
    from kvbench.metrics.collect import METRICS
    from kvbench.text import suggestion

    for metric in only:
        if metric not in METRICS:
            raise UsageError(
                f"--only {metric!r:.80} is not one.{suggestion(metric, METRICS)} docs/reference/metrics.md"
                " lists all of them, for example itl_ms, ppl, kld_mean, mcq_accuracy, kv_bytes_total."
            )
    if margin is not None and not 0 <= margin < 100:
        raise UsageError(f"--margin-pct {margin:g}: expected a number from 0 to 100, as in --margin-pct 1.")
    for path in outputs:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{path} cannot be written: give the name of a file in a folder that exists.")
