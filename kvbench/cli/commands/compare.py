"""`kvbench compare`: whether stored runs are better or worse than the first."""

from __future__ import annotations

import json
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
