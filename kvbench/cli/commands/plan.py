"""`kvbench plan`: what a run of a matrix would do."""

from __future__ import annotations

from typing import Any

from kvbench.cli.exits import handled
from kvbench.cli.loading import load_matrix, policy_for
from kvbench.cli.options import (
    DataOption,
    GateOption,
    JsonOption,
    MatrixArg,
    OutOption,
    RerunOption,
    SelectOption,
    SetOption,
    ShardOption,
    UntilOption,
    folder_of,
    rerun_of,
)
from kvbench.cli.scaleout import share_for


def plan(
    matrix: MatrixArg,
    set_: SetOption = [],  # noqa: B006
    k: SelectOption = None,
    out: OutOption = None,
    data_dir: DataOption = None,
    rerun: RerunOption = "missing",
    gate: GateOption = None,
    until_decided: UntilOption = False,
    shard: ShardOption = None,
    json_: JsonOption = False,
) -> None:
    """Show what would run: cells, backends with reasons, expected bytes, reused records, and gate checks that
    this matrix cannot answer."""
    with handled():
        from kvbench.cli.output import show
        from kvbench.preflight.plan import plan_cell, plan_json, plan_text
        from kvbench.records.run import RunDir
        from kvbench.run.execute import plan_tasks

        loaded, environment = load_matrix(matrix, set_, k, data_dir)
        share = share_for(shard, loaded, until_decided)
        tasks = plan_tasks(loaded, RunDir(out or folder_of(loaded.name, share)), rerun_of(rerun))
        policy = policy_for(gate, loaded)
        cells = [plan_cell(cell) for cell in loaded.cells]
        more: dict[str, Any] = {}
        lines: list[str] = []
        if until_decided:
            from kvbench.run import sequential

            planned = sequential.planned(loaded, policy)
            more = {"until_decided": {"looks": {r: x.to_dict() for r, x in planned.items() if x.several}}}
            lines = ["", *sequential.outline(planned)]
        if share is not None:
            from kvbench.records import shards

            more = {"shard": share.to_dict(loaded.tasks)}
            lines = ["", *shards.outline(share, loaded.cells, loaded.tasks)]
        show(
            json_,
            {**plan_json(loaded, cells, tasks, policy), **more},
            lambda: "\n".join([plan_text(loaded, cells, tasks, environment, policy), *lines]),
        )
