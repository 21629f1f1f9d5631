"""`kvbench gate` and `kvbench report`: judge a stored run again, and write its reports again."""

from __future__ import annotations

import typer

from kvbench.cli.exits import handled
from kvbench.cli.judging import judge
from kvbench.cli.options import DeviceOption, JsonOption, JudgeOption, QuietOption, RunArg


def gate(
    run_dir: RunArg,
    gate: JudgeOption = None,
    require_device: DeviceOption = None,
    quiet: QuietOption = False,
    json_: JsonOption = False,
) -> None:
    """Judge a stored run again, without a model or torch. The exit code is the verdict."""
    with handled():
        raise typer.Exit(judge(run_dir, gate, json_, quiet, require_device))


def report(
    run_dir: RunArg,
    gate: JudgeOption = None,
    require_device: DeviceOption = None,
    quiet: QuietOption = False,
    json_: JsonOption = False,
) -> None:
    """Write the reports of a stored run again. Exits 0 when they are written, whatever the verdict."""
    with handled():
        judge(run_dir, gate, json_, quiet, require_device, announced=False)
