"""`kvbench run`, `gate`, `report` and `merge`: what measures, and what judges stored records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from kvbench.cli import options
from kvbench.cli.commands import preflight
from kvbench.cli.judging import KEPT_GATE, judge
from kvbench.cli.loading import executor_of, folder_of, load_matrix, one_of, policy_for, share_for
from kvbench.cli.output import handled
from kvbench.errors import UsageError


def run(
    matrix: options.Matrix,
    set_: options.Set = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    k: options.Select = None,
    out: options.Out = None,
    gate: options.Gate = None,
    data_dir: options.Data = None,
    rerun: options.Rerun = "missing",
    until_decided: options.Until = False,
    executor: options.Executor = "inline",
    jobs: options.Jobs = None,
    shard: options.Shard = None,
    canary: options.Canary = False,
    dry_run: options.Dry = False,
    require_device: options.Device = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Measure a matrix, judge it, and write the report. The same command resumes an interrupted run."""
    if dry_run:
        return preflight.plan(matrix, set_, k, out, data_dir, rerun, gate, until_decided, shard, json_)
    with handled():
        from kvbench.records.run import RunDir
        from kvbench.run import execute
        from kvbench.run.progress import watcher

        loaded, environment = load_matrix(matrix, set_, k, data_dir)
        policy = policy_for(gate, loaded)  # a bad gate is refused before anything runs
        share = share_for(shard, loaded, until_decided or canary)
        target = out or folder_of(loaded.name, share)
        setup = execute.Setup(
            RunDir(target),
            environment,
            execute.command_line(),
            lambda: watcher(json_, quiet),
            data_dir,
            one_of("--rerun", rerun, options.RERUNS),
            executor_of(executor, jobs, data_dir, loaded, environment),
        )
        if canary and until_decided:
            raise UsageError("--canary and --until-decided cannot be combined; remove one of them.")
        if canary:
            from kvbench.run.canary import run_canary_first

            run_canary_first(loaded, policy, setup)
        elif until_decided:
            from kvbench.run.sequential import run_until_decided

            def resized(sizes: Any) -> Any:
                return load_matrix(matrix, set_, k, data_dir, sizes)[0]

            run_until_decided(loaded, policy, resized, setup)
        else:
            execute.run(loaded, setup, share)
        raise Exit(judge(target, gate or loaded.gate, json_, quiet, require_device))


def gate(
    run_dir: options.Run,
    gate: options.Judge = None,
    require_device: options.Device = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Judge a stored run again, without a model or torch. The exit code is the verdict."""
    with handled():
        raise Exit(judge(run_dir, gate, json_, quiet, require_device))


def report(
    run_dir: options.Run,
    gate: options.Judge = None,
    require_device: options.Device = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Write the reports of a stored run again. Exits 0 when they are written, whatever the verdict."""
    with handled():
        judge(run_dir, gate, json_, quiet, require_device, announced=False)


def merge(
    runs: Annotated[list[Path], Argument(help="Run directories that `kvbench run --shard` wrote")],
    out: Annotated[Path, Option("--out", help="Run directory of the merged run")],
    gate: options.Judge = None,
    json_: options.Json = False,
) -> None:
    """Join the shards of a matrix, judge them as one run, and write the report."""
    with handled():
        from kvbench.gate import policy
        from kvbench.run.merge import merge_runs

        kept = [run / KEPT_GATE for run in runs if (run / KEPT_GATE).is_file()]
        if gate is None and len({path.read_bytes() for path in kept}) > 1:
            raise UsageError(
                f"The shards were judged by different gates ({', '.join(map(str, kept))}); name the gate of "
                "the merged run: --gate FILE."
            )
        judged_by = gate or next(iter(kept), None)
        if judged_by is not None:
            policy.load(judged_by)
        merged = merge_runs(runs, out)
        for sentence in (*merged.differences, *(f"no shard measured {task}." for task in merged.missing)):
            print(f"kvbench: {sentence}", file=sys.stderr)
        raise Exit(judge(out, judged_by, json_))
