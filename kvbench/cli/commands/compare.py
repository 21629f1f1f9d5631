"""`kvbench compare`: whether stored runs are better or worse than the first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli import completion
from kvbench.cli.exits import handled, unreadable
from kvbench.cli.options import JsonOption, QuietOption, SelectOption
from kvbench.cli.stored import HtmlOption, MarginOption, MarkdownOption, OnlyOption
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
    """Compare stored runs with the first one, from their raw samples, without a model. Refuses runs that are not of the same work.

    Exits 0 when nothing is worse, 1 when something is (or a run's evidence does not hold), 2 when the runs are unlike, 3 when something
    could not be evaluated, 4 when the data cannot decide.
    """
    with handled("nothing was written, run the same command to start again"):
        from kvbench.cli import stored
        from kvbench.compare.two_runs import compare as compare_runs
        from kvbench.report.compare import two_runs as comparison
        from kvbench.report.write import write_text

        if len(runs) < 2:
            raise UsageError(
                f"compare takes two runs or more, {len(runs)} was given; name the reference first."
            )
        stored.check_metrics(only)
        stored.check_margin(margin_pct)
        stored.check_writable(markdown, html)
        found = [stored.stored(path, _name(i)) for i, path in enumerate(runs)]
        chosen = stored.chosen_cells(found, k)
        try:
            result = compare_runs(found, chosen, only, margin_pct)
            texts = [
                *([(markdown, comparison.as_markdown(result))] if markdown else []),
                *([(html, comparison.as_html(result))] if html else []),
            ]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            raise UsageError(unreadable(runs[0].parent, e)) from e
        paths = [write_text(path, text) for path, text in texts]
        if json_:
            print(json.dumps(comparison.as_json(result), ensure_ascii=False, allow_nan=False))
        else:
            comparison.show(result, paths, quiet=quiet)
        raise typer.Exit(result.exit_code)


def _name(i: int) -> str:
    """A, B, ... Z, A1, B1, ..."""
    return chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "")


def history(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or a folder that holds some; ordered by when they were made",
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
    """Show the values of many stored runs over time, and where one changed as `kvbench compare` would call it.

    Exits 0 when it is shown, whatever changed; 2 for folders that are no runs.
    """
    with handled("nothing was written, run the same command to start again"):
        from kvbench.cli import stored
        from kvbench.compare.history import history as history_of
        from kvbench.report.compare import timeline
        from kvbench.report.write import write_text

        stored.check_metrics(only)
        stored.check_margin(margin_pct)
        stored.check_writable(markdown, html)
        folders = _folders(runs)
        found = [stored.stored(path, "") for path in folders]
        found.sort(key=lambda run: (run.run.manifest.created_at, run.path))
        named = [replace(run, name=f"run {i}") for i, run in enumerate(found, start=1)]
        chosen = stored.chosen_cells(named, k)
        try:
            result = history_of(named, chosen, only, margin_pct)
            texts = [
                *([(markdown, timeline.as_markdown(result))] if markdown else []),
                *([(html, timeline.as_html(result))] if html else []),
            ]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            raise UsageError(unreadable(runs[0], e)) from e
        paths = [write_text(path, text) for path, text in texts]
        if json_:
            print(json.dumps(timeline.as_json(result), ensure_ascii=False, allow_nan=False))
        else:
            timeline.show(result, paths)


def _folders(given: list[Path]) -> list[Path]:
    """Runs as they are given, and the runs in a folder that is none itself; each once."""
    found: dict[Path, Path] = {}
    for path in given:
        inside = (
            [path] if (path / "run.json").is_file() else sorted(p.parent for p in path.glob("*/run.json"))
        )
        if not inside:
            raise UsageError(
                f"{path} is no run and holds none; give folders that `kvbench run` printed, or the folder that they lie in."
            )
        for one in inside:
            found.setdefault(one.resolve(), one)
    if len(found) < 2:
        raise UsageError(f"history takes two runs or more, {len(found)} was given.")
    return list(found.values())
