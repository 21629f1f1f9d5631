"""Before a run: `kvbench init`, `validate`, `plan` and `doctor`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from kvbench.cli import completion, options
from kvbench.cli.loading import check_data_dir, folder_of, load_matrix, one_of, policy_for, share_for
from kvbench.cli.output import handled, show
from kvbench.errors import KvbenchError


def init(
    target: Annotated[
        Path,
        Argument(metavar="DIR|FILE", help="Folder for matrix.yaml and gate.yaml, or a matrix file FILE.yaml"),
    ] = Path("."),
    model: Annotated[
        str, Option("--model", help="A model, as a matrix names it", autocompletion=completion.models)
    ] = "smollm2-135m-instruct",
    format_: Annotated[
        str,
        Option("--format", help="The KV format to compare with native", autocompletion=completion.kv_formats),
    ] = "int8_sym",
) -> None:
    """Write a commented matrix, its gate, and JSON Schemas for editors. Overwrites nothing."""
    with handled("run the same command to start again"):
        from kvbench.preflight.init import write

        matrix, *others = write(target, model, format_)
        print("\n".join(str(path) for path in (matrix, *others)))
        print(f"Next: kvbench validate {matrix} && kvbench run {matrix}")


def validate(
    files: Annotated[
        list[Path], Argument(help="Matrices and gates, in any order", autocompletion=completion.policies)
    ],
    set_: options.Set = [],  # noqa: B006
    k: options.Select = None,
    data_dir: options.Data = None,
    gate: options.Gate = None,
    device: Annotated[
        str | None,
        Option("--device", metavar="cpu|cuda", help="What device: auto means, instead of this machine's"),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Check matrices and gates: keys, model config, data, shape rules of the kernels, and whether the matrix
    answers its gate. Loads no model and needs no GPU. Exits 0 when all of it can run, else 2."""
    with handled("nothing was written"):
        from kvbench.data.fingerprint import fingerprint
        from kvbench.gate import policy
        from kvbench.preflight import validate as validation

        if device is not None:
            one_of("--device", device, ("cpu", "cuda"))

        def found(path: Path) -> validation.Finding:
            kind = validation.kind_of(path)
            try:
                if kind == validation.GATE:
                    return validation.of_gate(policy.load(path))
                loaded, environment = load_matrix(path, set_, k, data_dir, device=device)
                judged_by = policy_for(gate, loaded)
                return validation.of_matrix(
                    loaded, judged_by, lambda name, split: fingerprint(name, data_dir, split), environment
                )
            except KvbenchError as e:
                return validation.of_error(path, kind, e)

        all_ = [found(path) for path in files]
        code = 2 if any(one.problems for one in all_) else 0
        answer = {"files": [asdict(one) for one in all_], "exit_code": code}
        show(json_, answer, "\n".join(one.as_text() for one in all_))
        raise Exit(code)


def plan(
    matrix: options.Matrix,
    set_: options.Set = [],  # noqa: B006
    k: options.Select = None,
    out: options.Out = None,
    data_dir: options.Data = None,
    rerun: options.Rerun = "missing",
    gate: options.Gate = None,
    until_decided: options.Until = False,
    shard: options.Shard = None,
    json_: options.Json = False,
) -> None:
    """Show what would run: cells, backends with reasons, bytes, reused records, unanswered gate checks."""
    with handled():
        from kvbench.preflight.plan import plan_cell, plan_json, plan_text
        from kvbench.records import shards
        from kvbench.records.run import RunDir
        from kvbench.run.execute import plan_tasks

        loaded, environment = load_matrix(matrix, set_, k, data_dir)
        share = share_for(shard, loaded, until_decided)
        run_dir = RunDir(out or folder_of(loaded.name, share))
        tasks = plan_tasks(loaded, run_dir, one_of("--rerun", rerun, options.RERUNS))
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
            more = {"shard": share.to_dict(loaded.tasks)}
            lines = ["", *shards.outline(share, loaded.cells, loaded.tasks)]
        answer = {**plan_json(loaded, cells, tasks, policy), **more}
        show(json_, answer, lambda: "\n".join([plan_text(loaded, cells, tasks, environment, policy), *lines]))


def doctor(data_dir: options.Data = None, json_: options.Json = False) -> None:
    """Check versions, device, clocks, other processes, free cores, disk and data. Exits 1 for a problem."""
    with handled("nothing was written"):
        from kvbench.preflight.checkup import collect
        from kvbench.preflight.doctor import PROBLEM, lines

        check_data_dir(data_dir)
        found = lines(collect(data_dir))
        code = 1 if any(line.state == PROBLEM for line in found) else 0
        answer = {"lines": [asdict(line) for line in found], "exit_code": code}
        show(json_, answer, "\n".join(line.as_text() for line in found))
        raise Exit(code)
