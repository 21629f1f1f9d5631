"""Stored records judged: what `run`, `gate` and `report` have in common."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from kvbench.cli.output import DAMAGED, show, unreadable

KEPT_GATE = "gate.yaml"  # the policy that judged a run, in its folder


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
