"""What the options of a command stand for: the matrix, its gate, the executor."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.cli.options import EXECUTORS
from kvbench.errors import UsageError


def check_data_dir(data_dir: Path | None) -> None:
    from kvbench.data.corpora import HUB

    if data_dir is not None and str(data_dir) != HUB and not data_dir.is_dir():
        raise UsageError(
            f"The data folder {data_dir} does not exist; give a folder with the files that docs/matrices.md "
            f"lists under Evaluation data, or {HUB} to fetch them from the hub."
        )


def load_matrix(
    matrix: Path,
    overrides: list[str],
    select: str | None,
    data_dir: Path | None,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    device: str | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    """The matrix and this machine's environment. device: what `device: auto` means instead of this one's."""
    from kvbench.data.fingerprint import fingerprint as data_fingerprint
    from kvbench.machine.host import host
    from kvbench.matrix.load import load
    from kvbench.models.source import fingerprint

    check_data_dir(data_dir)
    here = replace(host(), device=device) if device else host()
    loaded = load(
        matrix,
        overrides,
        select,
        host=here,
        fingerprint_model=fingerprint,
        fingerprint_data=lambda name, split: data_fingerprint(name, data_dir, split),
        sizes=sizes or {},
    )
    return loaded, here.environment


def policy_for(gate: Path | None, loaded: Any) -> Any:
    """The policy of --gate, else the one that the matrix names; None without either."""
    from kvbench.gate import policy

    path = gate or loaded.gate
    return policy.load(path) if path else None


def one_of(option: str, value: str, known: Sequence[str]) -> Any:
    """The value. Raises UsageError where it is not known."""
    if value not in known:
        raise UsageError(f"{option} {value} is not known; use {', '.join(known)}.")
    return value


def folder_of(name: str, share: Any) -> Path:
    """The run directory without --out."""
    return Path("runs") / (f"{name}.shard-{share.shard.number}-of-{share.shard.of}" if share else name)


def executor_of(name: str, jobs: int | None, data_dir: Path | None, loaded: Any, environment: Any) -> Any:
    """The executor, None for this process. UsageError for an unknown name, and where Ray is not installed."""
    one_of("--executor", name, EXECUTORS)
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
            "remove one of them."
        )
    return shards.share_of(loaded.cells, loaded.tasks, shards.parse(shard))
