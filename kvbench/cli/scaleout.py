"""Options of a run that is measured elsewhere than in this process, or in shares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.errors import UsageError

EXECUTORS = ("inline", "local", "ray")

ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="|".join(EXECUTORS),
        help="Where cells are measured: in this process, each in a fresh one (a leased GPU each), or on a "
        "Ray cluster",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", help="Cells at once with --executor local (default: one a GPU, one on a CPU)"),
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only the I-th of N shares of the matrix; see kvbench merge"),
]


def executor_of(name: str, jobs: int | None, data_dir: Path | None, loaded: Any, environment: Any) -> Any:
    """What `kvbench.run.execute.run` takes: None for this process. Raises UsageError for a wrong word, and
    where Ray is not installed."""
    if name not in EXECUTORS:
        raise UsageError(f"--executor {name} is not known; use {', '.join(EXECUTORS)}.")
    if jobs is not None and (jobs < 1 or name != "local"):
        raise UsageError(f"--jobs {jobs} is a number of cells from 1 on, and goes with --executor local.")
    if name == "local":
        from kvbench.run.executors.local import Local, notices

        for notice in notices(environment, [cell.spec["device"] for cell in loaded.cells], jobs):
            print(f"kvbench: {notice}", file=sys.stderr)
        return Local(data_dir, jobs)
    if name == "ray":
        from kvbench.run.executors.ray import OnRay, module

        module()
        return OnRay(data_dir)
    return None


def share_for(shard: str | None, loaded: Any, stops_early: bool) -> Any:
    """The share that --shard names, None without one. Raises UsageError."""
    if shard is None:
        return None
    from kvbench.records import shards

    if stops_early:
        raise UsageError(
            "--shard cannot be run with --until-decided or --canary: a share decides no verdict; leave one "
            "of them out."
        )
    return shards.share_of(loaded.cells, loaded.tasks, shards.parse(shard))


def folder_of(name: str, share: Any) -> Path:
    """Where a run goes without --out."""
    return Path("runs") / (f"{name}.shard-{share.shard.number}-of-{share.shard.of}" if share else name)
