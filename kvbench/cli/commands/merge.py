"""`kvbench merge`: the shards of a matrix joined, judged and reported as one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exits import handled
from kvbench.cli.judging import KEPT_GATE, judge
from kvbench.cli.options import JsonOption, JudgeOption
from kvbench.errors import UsageError


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Run directories that `kvbench run --shard` wrote")],
    out: Annotated[Path, typer.Option("--out", help="Run directory of the merged run")],
    gate: JudgeOption = None,
    json_: JsonOption = False,
) -> None:
    """Join the shards of a matrix, judge them as one run, and write the report."""
    with handled():
        from kvbench.gate import policy as policies
        from kvbench.run.merge import merge_runs

        policy = gate or _policy_of_all(runs)
        if policy is not None:
            policies.load(policy)
        merged = merge_runs(runs, out)
        for sentence in (*merged.differences, *(f"no shard measured {task}." for task in merged.missing)):
            print(f"kvbench: {sentence}", file=sys.stderr)
        raise typer.Exit(judge(out, policy, json_))


def _policy_of_all(runs: Sequence[Path]) -> Path | None:
    """The policy that judged the shards, or None. Raises UsageError where they were judged by several."""
    kept = [run / KEPT_GATE for run in runs if (run / KEPT_GATE).is_file()]
    if len({path.read_bytes() for path in kept}) > 1:
        raise UsageError(
            f"The shards were judged by different gates ({', '.join(map(str, kept))}); name the gate of the "
            f"merged "
            "run: --gate FILE."
        )
    return kept[0] if kept else None
