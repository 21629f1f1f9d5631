"""`kvbench selftest`: faults injected into the live code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvbench.cli.exits import handled
from kvbench.cli.options import JsonOption


def selftest(
    fault: Annotated[
        list[str], typer.Option("--fault", metavar="NAME", help="Only this fault; repeatable")
    ] = [],  # noqa: B006
    list_: Annotated[
        bool, typer.Option("--list", help="Show the faults and the known holes; run nothing")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Break the engine on purpose, one fault at a time, and check that the gate catches each. Exits 0 when it
    does."""
    with handled("nothing of a self-test is kept"):
        from kvbench.cli.output import show
        from kvbench.selftest.suite import listing, run_suite
        from kvbench.selftest.table import FAULTS, HOLES

        if list_:
            known = listing(FAULTS, HOLES)
            show(json_, known, "\n".join(row["line"] for row in known))
            return
        lines = sys.stderr if json_ else sys.stdout
        score = run_suite(FAULTS, fault, lambda result: print(result.line(), file=lines, flush=True))
        show(json_, score.as_json(), score.last_line())
        raise typer.Exit(score.exit_code)
