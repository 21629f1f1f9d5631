"""`kvbench run`, `gate`, `report` and `merge`: what measures, and what judges stored records."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from kvbench.cli import options
from kvbench.cli.commands import preflight
from kvbench.cli.loading import executor_of, folder_of, load_matrix, one_of, policy_for, share_for
from kvbench.cli.output import DAMAGED, handled, show, unreadable
from kvbench.errors import UsageError

KEPT_GATE = "gate.yaml"  # the policy that judged a run, in its folder


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


def judge(
    run_dir: Path,
    gate: Path | None,
    as_json: bool,
    quiet: bool = False,
    require_device: bool | None = None,  # None: what the environment says
    announced: bool = True,  # whether a CI system is told
) -> int:
    """Judge stored records, write the report, print the result; returns the exit code."""
    from kvbench.files import write_file
    from kvbench.gate import evaluate as gates
    from kvbench.machine.ci import device_required
    from kvbench.metrics.collect import METRICS, derive
    from kvbench.records.run import RunDir
    from kvbench.report.console import show_tables, show_verdict
    from kvbench.report.github import announce
    from kvbench.report.json import result_json
    from kvbench.report.model import JudgedRun
    from kvbench.report.view import build
    from kvbench.report.write import write_all

    folder = RunDir(run_dir)
    # An error from here on must not leave an earlier verdict behind.
    folder.junit_path.unlink(missing_ok=True)
    run = folder.load()
    named = gate or policy_of(run_dir, run.manifest.gate)
    policy = gates.load(named) if named else None
    # The report names the policy that judged.
    run = replace(run, manifest=replace(run.manifest, gate=str(named) if named else None))
    try:
        rows = derive(run)
        verdict = gates.evaluate(policy, run, rows, device_required(require_device, os.environ))
        judged = JudgedRun(run, rows, verdict)
        view = build(judged, {name: metric.definition for name, metric in METRICS.items()})
        unprinted: OSError | None = None  # a full disk or a closed pipe must not cost the report
        if not (as_json or quiet):
            try:
                show_tables(view, sys.stdout)  # before the plots are drawn, which takes longest
                sys.stdout.flush()
            except OSError as e:
                unprinted = e
        paths = write_all(run_dir, judged, view)
    except DAMAGED as e:
        raise unreadable(run_dir, e) from e
    try:
        if unprinted:
            raise unprinted
        if gate is not None:
            write_file(run_dir / KEPT_GATE, gate.read_text(encoding="utf-8"))
        if as_json:
            show(True, result_json(judged), "")
        else:
            show_verdict(view, sys.stdout, paths)
        if announced:
            for line in announce(judged, policy, os.environ):
                print(line, file=sys.stderr)
        sys.stdout.flush()  # a full disk is met here, not after the exit code is taken
    except BaseException:
        # The exit code is not the verdict's, so no green test suite may stay.
        folder.junit_path.unlink(missing_ok=True)
        raise
    return int(verdict.exit_code)


def policy_of(run_dir: Path, named: str | None) -> Path | None:
    """The policy that judged the run last, which it keeps; else the one that its matrix names, or None.

    named: the gate of the matrix. If its file differs from the copy, the copy judges and a message says so: a
    policy given with --gate must not give way in silence.
    """
    kept, file = run_dir / KEPT_GATE, Path(named) if named else None
    if not kept.is_file():
        return file
    if file is not None and file.is_file() and file.read_bytes() != kept.read_bytes():
        print(
            f"kvbench: judged by {kept}, as last time; {file}, which the matrix names, differs from it. To "
            f"judge by that: --gate {file}.",
            file=sys.stderr,
        )
    return kept
