"""`kvbench doctor`: whether this machine is fit to measure on."""

from __future__ import annotations

import typer

from kvbench.cli.exits import handled
from kvbench.cli.options import DataOption, JsonOption, check_data_dir


def doctor(data_dir: DataOption = None, json_: JsonOption = False) -> None:
    """Check versions, device, clocks, other processes, free cores, disk and data; each is ok or has a remedy.
    Exits 1 for a problem."""
    with handled("nothing was written"):
        from kvbench.cli.output import show
        from kvbench.preflight.checkup import collect
        from kvbench.preflight.doctor import exit_code, lines

        check_data_dir(data_dir)
        found = lines(collect(data_dir))
        code = exit_code(found)
        answer = {"lines": [line.as_json() for line in found], "exit_code": code}
        show(json_, answer, "\n".join(line.as_text() for line in found))
        raise typer.Exit(code)
