"""The command line: composition only. JSON goes to stdout with --json; logs and progress go to stderr.

Exit codes: 0 every check passed; 1 a check failed (precision mismatch included); 2 bad matrix, gate or usage;
3 a cell errored or a required check was not evaluated; 4 the data cannot decide; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvbench import __version__
from kvbench.commands.calibrate import calibrate
from kvbench.commands.check_table import check_table
from kvbench.commands.gate import gate
from kvbench.commands.lm_eval import lm_eval
from kvbench.commands.plan import plan
from kvbench.commands.quantize import quantize
from kvbench.commands.report import report
from kvbench.commands.reproduce import reproduce
from kvbench.commands.run import run
from kvbench.commands.schema import schema
from kvbench.commands.selftest import selftest

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Proves which precision an engine ran in, measures what it costs and gains, and judges whether it may ship.",
)

# In the order of the help text; one file a command in kvbench/commands/.
COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan,
    "run": run,
    "gate": gate,
    "report": report,
    "check-table": check_table,
    "reproduce": reproduce,
    "selftest": selftest,
    "calibrate": calibrate,
    "quantize": quantize,
    "lm-eval": lm_eval,
    "schema": schema,
}
# Commands that hand all their arguments on, --help too.
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
for _name, _command in COMMANDS.items():
    app.command(_name, context_settings=HANDED_ON if _name == "lm-eval" else None)(_command)


def _version(value: bool) -> None:
    if value:
        print(f"kvbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Entry point of the `kvbench` script and of `python -m kvbench`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; the exit code still tells
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    app()


if __name__ == "__main__":
    main()
