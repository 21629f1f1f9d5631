"""Runs that are measured outside this process, or in shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvbench.cli.options import EXECUTORS
from kvbench.errors import UsageError


def executor_of(name: str, jobs: int | None, data_dir: Path | None, loaded: Any, environment: Any) -> Any:
    """The executor for `kvbench.run.execute.run`, None for this process. Raises UsageError for an unknown
    name, and where Ray is not installed."""
    if name not in EXECUTORS:
        raise UsageError(f"--executor {name} is not known; use {', '.join(EXECUTORS)}.")
    if jobs is not None and (jobs < 1 or name != "local"):
        raise UsageError(f"--jobs {jobs}: expected a number of at least 1, together with --executor local.")
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
            "--shard cannot be combined with --until-decided or --canary, since a shard decides no verdict; "
            "remove "
            "one of them."
        )
    return shards.share_of(loaded.cells, loaded.tasks, shards.parse(shard))
