"""`kvbench data`: the evaluation data that is known by name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbench.cli.completion import corpora
from kvbench.cli.exits import handled
from kvbench.cli.options import DataOption, JsonOption, check_data_dir
from kvbench.errors import UsageError

ACTIONS = ("list", "fetch", "verify")


def data(
    action: Annotated[str, typer.Argument(metavar="list|fetch|verify", help="What to do")] = "list",
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Corpora and question sets (default: all)", autocompletion=corpora),
    ] = None,
    data_dir: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the evaluation data, fetch it through the hub where that is allowed, or read all of what is here. verify exits 1 when
    something is broken."""
    with handled("run the same command to go on"):
        from kvbench.cli.showing import show_held
        from kvbench.preflight import assets as holdings

        check_data_dir(data_dir)
        if action not in ACTIONS:
            raise UsageError(f"kvbench data {action} is not known; use {', '.join(ACTIONS)}.")
        if unknown := [one for one in name or [] if one not in holdings.data_names()]:
            raise UsageError(
                f"There is no data {unknown[0]!r}; use one of {', '.join(holdings.data_names())}."
            )
        if action == "list":
            held = [one for one in holdings.data(data_dir) if not name or one.name in name]
            show_held(held, json_)
        elif action == "verify":
            all_ = [holdings.verify_data(one, data_dir) for one in name or holdings.data_names()]
            show_held(all_, json_, named=bool(name))
        else:
            if not name:
                raise UsageError(f"Name what to fetch: {', '.join(holdings.data_names())}.")
            show_held([holdings.fetch_data(one, data_dir) for one in name], json_)
