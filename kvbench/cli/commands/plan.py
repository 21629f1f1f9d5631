"""`kvbench plan`: what a run of a matrix would do."""

from __future__ import annotations

import json
from typing import Any

from kvbench.cli.exits import handled
from kvbench.cli.loading import load_matrix
from kvbench.cli.options import (
    DataOption,
    GateOption,
    JsonOption,
    MatrixArg,
    OutOption,
    RerunOption,
    SelectOption,
    SetOption,
    UntilOption,
    rerun_of,
)
from kvbench.cli.scaleout import ShardOption, folder_of, share_for


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
    """Show cells, decisions with reasons, estimated bytes, what would be reused, and what the gate asks in vain. Runs nothing."""
    with handled():
        from kvbench.gate import evaluate as gates
        from kvbench.preflight.plan import plan_cell, plan_json, plan_text
        from kvbench.records.run import RunDir
        from kvbench.run.execute import plan_tasks

        loaded, environment = load_matrix(matrix, set_, k, data_dir)
        share = share_for(shard, loaded, until_decided)
        tasks = plan_tasks(loaded, RunDir(out or folder_of(loaded.name, share)), rerun_of(rerun))
        policy = gates.load(gate or loaded.gate) if gate or loaded.gate else None
        cells = [plan_cell(cell) for cell in loaded.cells]
        looks: dict[str, Any] = {}
        said: list[str] = []
        if until_decided:
            from kvbench.run import escalate

            planned = escalate.planned(loaded, policy)
            looks = {"until_decided": {"looks": {r: x.to_dict() for r, x in planned.items() if x.several}}}
            said = ["", *escalate.outline(planned)]
        if share is not None:
            from kvbench.records import shards

            looks = {"shard": share.to_dict(loaded.tasks)}
            said = ["", *shards.outline(share, loaded.cells, loaded.tasks)]
        if json_:
            print(json.dumps({**plan_json(loaded, cells, tasks, policy), **looks}, ensure_ascii=False))
        else:
            print("\n".join([plan_text(loaded, cells, tasks, environment, policy), *said]))
