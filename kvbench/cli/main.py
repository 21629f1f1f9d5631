"""The command line: composition only. JSON goes to stdout with --json; logs and progress go to stderr.

Exit codes: 0 every check passed; 1 a check failed (precision mismatch included); 2 bad matrix, gate or usage;
3 a cell errored or a required check was not evaluated; 4 too little data to decide; 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvbench import __version__
from kvbench.cli.commands.assets import data, models
from kvbench.cli.commands.checkpoints import calibrate, quantize
from kvbench.cli.commands.compare import compare, history
from kvbench.cli.commands.doctor import doctor
from kvbench.cli.commands.formats import backends, formats
from kvbench.cli.commands.init import init
from kvbench.cli.commands.judge import gate, report
from kvbench.cli.commands.lm_eval import lm_eval
from kvbench.cli.commands.merge import merge
from kvbench.cli.commands.plan import plan
from kvbench.cli.commands.published import check_table, reproduce
from kvbench.cli.commands.run import run
from kvbench.cli.commands.schema import schema
from kvbench.cli.commands.selftest import selftest
from kvbench.cli.commands.validate import validate
from kvbench.cli.examples import epilog
from kvbench.cli.signals import end_cleanly

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the boxes leave 17 of 80 columns to the words
    help="Proves which precision an engine ran in, measures what it costs and gains, and judges whether it "
    "may ship.",
)

# In the order of the help text.
COMMANDS: dict[str, Callable[..., None]] = {
    "init": init,
    "validate": validate,
    "plan": plan,
    "run": run,
    "gate": gate,
    "report": report,
    "merge": merge,
    "compare": compare,
    "history": history,
    "check-table": check_table,
    "reproduce": reproduce,
    "selftest": selftest,
    "calibrate": calibrate,
    "quantize": quantize,
    "lm-eval": lm_eval,
    "schema": schema,
    "formats": formats,
    "backends": backends,
    "doctor": doctor,
    "models": models,
    "data": data,
}
# For a command that passes its arguments on.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
for _name, _command in COMMANDS.items():
    app.command(_name, epilog=epilog(_name), context_settings=PASSED_ON if _name == "lm-eval" else None)(
        _command
    )


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
        if getattr(sys, name) is None:  # closed by the caller; the exit code still counts
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that it cannot encode is printed as its escape
            stream.reconfigure(errors="backslashreplace")
    end_cleanly()
    app(prog_name="kvbench")  # `python -m kvbench` too: usage lines and the completion variable go by it


if __name__ == "__main__":
    main()
