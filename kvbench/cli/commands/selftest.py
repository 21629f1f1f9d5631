"""`kvbench selftest`: faults injected into the live code."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from kvbench.cli.exits import handled
from kvbench.cli.options import JsonOption


def selftest(
    fault: Annotated[
        list[str], typer.Option("--fault", metavar="NAME", help="Only this one; may be given again")
    ] = [],  # noqa: B006
    list_: Annotated[
        bool, typer.Option("--list", help="Show the faults and the known holes; runs nothing")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Break the engine on purpose, one fault at a time, and see whether the gate catches each. Exits 0 when
    it does."""
    with handled("nothing is kept of a self-test"):
        from kvbench.selftest.suite import listing, run_suite
        from kvbench.selftest.table import FAULTS, HOLES

        if list_:
            known = listing(FAULTS, HOLES)
            print(json.dumps(known, ensure_ascii=False) if json_ else "\n".join(row["line"] for row in known))
            return
        lines = sys.stderr if json_ else sys.stdout
        score = run_suite(FAULTS, fault, lambda result: print(result.line(), file=lines, flush=True))
        print(json.dumps(score.as_json(), ensure_ascii=False) if json_ else score.last_line())
        raise typer.Exit(score.exit_code)
