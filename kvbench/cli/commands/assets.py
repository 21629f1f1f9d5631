"""`kvbench models` and `kvbench data`: what is here, whether it is whole, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbench.cli.completion import corpora
from kvbench.cli.completion import models as model_names
from kvbench.cli.exits import handled
from kvbench.cli.options import DataOption, JsonOption, check_data_dir
from kvbench.errors import UsageError

ACTIONS = ("list", "fetch", "verify")


def models(
    action: Annotated[str, typer.Argument(metavar="list|fetch|verify", help="What to do")] = "list",
    name: Annotated[
        list[str] | None,
        typer.Argument(
            help="fetch: names to fetch; verify: names, folders or .gguf files (default: all that are here)",
            autocompletion=model_names,
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Show the models that are known by name, fetch one, or verify the bytes of what is here. verify exits 1
    when something is broken."""
    with handled("nothing half-written is kept, run the same command to go on"):
        from kvbench.cli.showing import show_held
        from kvbench.models.catalog import ALIASES
        from kvbench.models.download import fetch
        from kvbench.models.source import kind_of
        from kvbench.preflight import assets as holdings

        if action not in ACTIONS:
            raise UsageError(f"kvbench models {action} is not known; use {', '.join(ACTIONS)}.")
        names = name or []
        if action == "list":
            show_held([held for held in holdings.models() if not names or held.name in names], json_)
        elif action == "fetch":
            if not names:
                raise UsageError(f"Name what to fetch: {', '.join(ALIASES)}.")
            for one in names:
                if kind_of(one) == "hub":
                    raise UsageError(
                        f"{one} is on the hub: the first run fetches it, or hf download {one}. kvbench "
                        f"models fetch gets "
                        f"{', '.join(ALIASES)}."
                    )
                if one not in ALIASES:
                    raise UsageError(
                        f"{one} needs no fetching; kvbench models fetch gets {', '.join(ALIASES)}."
                    )
            for one in names:
                fetch(one)
            show_held([held for held in holdings.models() if held.name in names], json_)
        else:
            here = names or [held.name for held in holdings.models() if held.state == holdings.HERE]
            show_held([holdings.verify_model(one) for one in here], json_, named=bool(names))


def data(
    action: Annotated[str, typer.Argument(metavar="list|fetch|verify", help="What to do")] = "list",
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Corpora and question sets (default: all)", autocompletion=corpora),
    ] = None,
    data_dir: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the evaluation data, fetch it through the hub where that is allowed, or read all of what is here.
    verify exits 1 when something is broken."""
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
