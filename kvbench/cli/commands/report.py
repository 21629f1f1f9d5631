"""`kvbench report`: writes the report of a stored run again."""

from __future__ import annotations

from kvbench.cli.exits import handled
from kvbench.cli.judging import judge
from kvbench.cli.options import DeviceOption, JsonOption, JudgeOption, QuietOption, RunArg


def report(
    run_dir: RunArg,
    gate: JudgeOption = None,
    require_device: DeviceOption = None,
    quiet: QuietOption = False,
    json_: JsonOption = False,
) -> None:
    """Write the report's files of a stored run again. Exits 0 when they are written, whatever the verdict."""
    with handled():
        judge(run_dir, gate, json_, quiet, require_device, announced=False)
