"""`kvbench merge`: shards of a matrix put together, judged and reported as one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbench.commands.judging import KEPT_GATE, judge
from kvbench.commands.options import GateOption, JsonOption
from kvbench.exits import handled


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Run directories that `kvbench run --shard` wrote")],
    out: Annotated[Path, typer.Option("--out", help="Run directory of the merged run")],
    gate: GateOption = None,
    json_: JsonOption = False,
) -> None:
    """Put the shards of a matrix together, judge them as one run, and write the report."""
    with handled():
        from kvbench import gate as gates
        from kvbench.merge import merge_runs
        from kvbench.report.write import write_text

        if gate is not None:
            gates.load(gate)
        merged = merge_runs(runs, out)
        for sentence in (*merged.differences, *(f"nobody measured {task}." for task in merged.missing)):
            print(f"kvbench: {sentence}", file=sys.stderr)
        kept = gate or next((run / KEPT_GATE for run in runs if (run / KEPT_GATE).is_file()), None)
        if kept is not None:
            write_text(out / KEPT_GATE, kept.read_text(encoding="utf-8"))
        raise typer.Exit(judge(out, gate, json_))
