"""`kvbench compare` and `kvbench history`: stored runs against the first, and over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import completion
from kvbench.cli.exits import DAMAGED, NOTHING_WRITTEN, handled, unreadable
from kvbench.cli.options import (
    HtmlOption,
    JsonOption,
    MarginOption,
    MarkdownOption,
    OnlyOption,
    QuietOption,
    SelectOption,
)
from kvbench.errors import UsageError


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C ...]",
            help="Run directories; the first is the reference",
            autocompletion=completion.runs,
        ),
    ],
    k: SelectOption = None,
    only: OnlyOption = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    margin_pct: MarginOption = None,
    quiet: QuietOption = False,
    json_: JsonOption = False,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
) -> None:
    """Compare stored runs with the first one, from their raw samples, without a model. Refuses runs of
    different work.

    Exits 0 when nothing is worse, 1 when something is (or a run is invalid on its own), 2 when the runs
    cannot be compared, 3 when something could not be evaluated, 4 when there is too little data to decide.
    """
    with handled(NOTHING_WRITTEN):
        from kvbench.cli import stored
        from kvbench.cli.output import show
        from kvbench.compare.two_runs import compare as compare_runs
        from kvbench.report.compare import two_runs as pages

        if len(runs) < 2:
            raise UsageError(f"compare needs two runs or more, got {len(runs)}; name the reference first.")
        stored.check_options(only, margin_pct, markdown, html)
        found = [stored.stored(path, _name(i)) for i, path in enumerate(runs)]
        chosen = stored.chosen_cells(found, k)
        result, paths = _written(
            runs[0].parent, lambda: compare_runs(found, chosen, only, margin_pct), pages, markdown, html
        )
        if json_:
            show(True, pages.as_json(result), "")
        else:
            pages.show(result, paths, quiet=quiet)
        raise typer.Exit(result.exit_code)


def history(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or a folder of them; ordered by the time they were made",
            autocompletion=completion.runs,
        ),
    ],
    k: SelectOption = None,
    only: OnlyOption = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    margin_pct: MarginOption = None,
    json_: JsonOption = False,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
) -> None:
    """Show the values of many stored runs over time, and where `kvbench compare` would report a change.

    Exits 0 whatever changed; 2 for folders that are not runs.
    """
    with handled(NOTHING_WRITTEN):
        from kvbench.cli import stored
        from kvbench.cli.output import show
        from kvbench.compare.history import history as history_of
        from kvbench.report.compare import timeline as pages

        stored.check_options(only, margin_pct, markdown, html)
        found = [stored.stored(path, "") for path in _folders(runs)]
        found.sort(key=lambda run: (run.run.manifest.created_at, run.path))
        named = [replace(run, name=f"run {i}") for i, run in enumerate(found, start=1)]
        chosen = stored.chosen_cells(named, k)
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
        raise UsageError(unreadable(folder, e)) from e
    return result, [write_file(path, text) for path, text in texts]


def _name(i: int) -> str:
    """A, B, ... Z, A1, B1, ..."""
    return chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "")


def _folders(given: Sequence[Path]) -> list[Path]:
    """Each given run, and each run inside a given folder that is not a run itself; each once."""
    found: dict[Path, Path] = {}
    for path in given:
        inside = (
            [path] if (path / "run.json").is_file() else sorted(p.parent for p in path.glob("*/run.json"))
        )
        if not inside:
            raise UsageError(
                f"{path} is not a run and holds none; give folders that `kvbench run` printed, or the "
                f"folder that "
                "they are in."
            )
        for one in inside:
            found.setdefault(one.resolve(), one)
    if len(found) < 2:
        raise UsageError(f"history needs two runs or more, got {len(found)}.")
    return list(found.values())
