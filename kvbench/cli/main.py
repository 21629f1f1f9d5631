"""The command line: composition only. JSON goes to stdout with --json; logs and progress go to stderr.

Exit codes: 0 every check passed; 1 a check failed (precision mismatch included); 2 bad matrix, gate or usage;
3 a cell errored or a required check was not evaluated; 4 too little data to decide; 130 interrupted.
"""

import io
import os
import sys
from typing import Annotated

import typer

from kvbench import __version__
from kvbench.cli.commands import catalog, compare, engine, preflight, published, run
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
_FUNCTIONS = (
    *(preflight.init, preflight.validate, preflight.plan),
    *(run.run, run.gate, run.report, run.merge, compare.compare, compare.history),
    *(published.check_table, published.reproduce),
    *(engine.selftest, engine.calibrate, engine.quantize, engine.lm_eval),
    *(catalog.schema, catalog.formats, catalog.backends, preflight.doctor, catalog.models, catalog.data),
)
COMMANDS = {function.__name__.replace("_", "-"): function for function in _FUNCTIONS}
for _name, _command in COMMANDS.items():
    # lm-eval passes its arguments on.
    _settings = {"allow_extra_args": True, "ignore_unknown_options": True} if _name == "lm-eval" else None
    app.command(_name, epilog=epilog(_name), context_settings=_settings)(_command)


def _version(value: bool) -> None:
    if value:
        print(f"kvbench {__version__}")
        raise typer.Exit


_Version = typer.Option("--version", callback=_version, is_eager=True, help="Show the version")


@app.callback()
def _root(version: Annotated[bool, _Version] = False) -> None:
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
