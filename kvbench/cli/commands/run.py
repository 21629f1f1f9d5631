"""`kvbench run`: measures a matrix, judges it and writes the report."""

from __future__ import annotations

from typing import Any

import typer

from kvbench.cli.exits import handled
from kvbench.cli.judging import judge
from kvbench.cli.loading import load_matrix
from kvbench.cli.options import (
    CanaryOption,
    DataOption,
    DeviceOption,
    DryOption,
    ExecutorOption,
    GateOption,
    JobsOption,
    JsonOption,
    MatrixArg,
    OutOption,
    QuietOption,
    RerunOption,
    SelectOption,
    SetOption,
    ShardOption,
    UntilOption,
    folder_of,
    rerun_of,
)
from kvbench.cli.scaleout import executor_of, share_for
from kvbench.errors import UsageError


def run(
    matrix: MatrixArg,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    k: SelectOption = None,
    out: OutOption = None,
    gate: GateOption = None,
    data_dir: DataOption = None,
    rerun: RerunOption = "missing",
    until_decided: UntilOption = False,
    executor: ExecutorOption = "inline",
    jobs: JobsOption = None,
    shard: ShardOption = None,
    canary: CanaryOption = False,
    dry_run: DryOption = False,
    require_device: DeviceOption = None,
    quiet: QuietOption = False,
    json_: JsonOption = False,
) -> None:
    """Measure a matrix, judge it, and write the report. The same command resumes an interrupted run."""
    if dry_run:
        from kvbench.cli.commands.plan import plan

        return plan(matrix, set_, k, out, data_dir, rerun, gate, until_decided, shard, json_)
    with handled():
        from kvbench.gate import policy as policies
        from kvbench.records.run import RunDir
        from kvbench.run.execute import command_line
        from kvbench.run.execute import run as run_matrix
        from kvbench.run.progress import watcher

        loaded, environment = load_matrix(matrix, set_, k, data_dir)
        policy = gate or loaded.gate
        judged_by = policies.load(policy) if policy else None  # a bad gate is refused before anything runs
        share = share_for(shard, loaded, until_decided or canary)
        target = out or folder_of(loaded.name, share)
        how = (data_dir, rerun_of(rerun), executor_of(executor, jobs, data_dir, loaded, environment))
        if canary and until_decided:
            raise UsageError("--canary and --until-decided cannot be combined; remove one of them.")
        where = RunDir(target), environment, command_line()

        def watch() -> Any:
            return watcher(json_, quiet)

        if canary:
            from kvbench.run.canary import run_canary_first

            run_canary_first(loaded, judged_by, *where, watch, *how)
        elif until_decided:
            from kvbench.run.sequential import run_until_decided

            def resized(sizes: Any) -> Any:
                return load_matrix(matrix, set_, k, data_dir, sizes)[0]

            run_until_decided(loaded, judged_by, resized, *where, watch, *how)
        else:
            run_matrix(loaded, *where, watch(), *how, share)
        raise typer.Exit(judge(target, policy, json_, quiet, require_device))
