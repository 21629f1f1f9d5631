"""`kvbench models` and `kvbench data`: what is here, whether it is intact, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbench.cli.completion import corpora
from kvbench.cli.completion import models as model_names
from kvbench.cli.exits import handled
from kvbench.cli.options import DataOption, JsonOption, check_data_dir
from kvbench.errors import UsageError

ACTIONS = ("list", "fetch", "verify")
Action = Annotated[str, typer.Argument(metavar="|".join(ACTIONS), help="What to do")]


def models(
    action: Action = "list",
    name: Annotated[
        list[str] | None,
        typer.Argument(
            help="fetch: names to fetch; verify: names, folders or .gguf files (default: all that are here)",
            autocompletion=model_names,
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Show the models that are known by name, fetch one, or verify the bytes of those here. verify exits 1
    when a file is broken."""
    with handled("no partial file is kept; run the same command to continue"):
        from kvbench.cli.output import show_held
        from kvbench.models.catalog import ALIASES
        from kvbench.models.download import fetch
        from kvbench.preflight import assets

        names = name or []
        _check_action("models", action)
        if action == "verify":
            here = names or [held.name for held in assets.models() if held.state == assets.HERE]
            show_held([assets.verify_model(one) for one in here], json_, named=bool(names))
            return
        if action == "fetch":
            _check_fetchable(names, list(ALIASES))
            for one in names:
                fetch(one)
        show_held([held for held in assets.models() if not names or held.name in names], json_)


def data(
    action: Action = "list",
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Texts and question sets (default: all)", autocompletion=corpora),
    ] = None,
    data_dir: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the evaluation data, fetch it through the hub where that is allowed, or verify all that is here.
    verify exits 1 when a set is broken."""
    with handled("run the same command to continue"):
        from kvbench.cli.output import show_held
        from kvbench.preflight import assets

        check_data_dir(data_dir)
        _check_action("data", action)
        known = assets.data_names()
        if unknown := [one for one in name or [] if one not in known]:
            raise UsageError(f"Unknown data {unknown[0]!r}; use one of {', '.join(known)}.")
        if action == "list":
            show_held([one for one in assets.data(data_dir) if not name or one.name in name], json_)
        elif action == "verify":
            held = [assets.verify_data(one, data_dir) for one in name or known]
            show_held(held, json_, named=bool(name))
        elif not name:
            raise UsageError(f"Name what to fetch: {', '.join(known)}.")
        else:
            show_held([assets.fetch_data(one, data_dir) for one in name], json_)


def _check_action(command: str, action: str) -> None:
    if action not in ACTIONS:
        raise UsageError(f"kvbench {command} {action} is not known; use {', '.join(ACTIONS)}.")


def _check_fetchable(names: list[str], aliases: list[str]) -> None:
    from kvbench.models.source import kind_of

    if not names:
        raise UsageError(f"Name what to fetch: {', '.join(aliases)}.")
    for one in names:
        if kind_of(one) == "hub":
            raise UsageError(
                f"{one} is on the hub: the first run downloads it, or use hf download {one}. kvbench models "
                f"fetch "
                f"downloads {', '.join(aliases)}."
            )
        if one not in aliases:
            raise UsageError(f"{one} needs no fetching; kvbench models fetch downloads {', '.join(aliases)}.")
