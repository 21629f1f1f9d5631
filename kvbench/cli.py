"""The command line: composition only. JSON goes to stdout with --json; logs and progress go to stderr.

Exit codes: 0 every check passed; 1 a check failed (precision mismatch included); 2 bad matrix, gate or usage;
3 a cell errored or a required check was not evaluated; 4 the data cannot decide; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench import __version__
from kvbench.errors import UsageError
from kvbench.exits import handled, unreadable

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Proves which precision an engine ran in, measures what it costs and gains, and judges whether it may ship.",
)

KEPT_GATE = "gate.yaml"  # the policy that judged a run, in its folder

MatrixArg = Annotated[Path, typer.Argument(help="YAML matrix, e.g. matrices/int8.yaml")]
RunArg = Annotated[Path, typer.Argument(help="Run directory that `kvbench run` wrote")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set runners.latency.repeats=5"),
]
SelectOption = Annotated[
    str | None, typer.Option("-k", metavar="EXPR", help="Keep cells by name: -k 'int8_sym and not batch=4'")
]
DataOption = Annotated[
    Path | None, typer.Option("--data-dir", envvar="KVBENCH_DATA_DIR", help="Folder of the evaluation data")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Run directory (default: runs/ and the matrix's name)")
]
GateOption = Annotated[
    Path | None, typer.Option("--gate", help="Gate policy (default: the one the matrix names)")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout")]
RerunOption = Annotated[
    str, typer.Option("--rerun", help="missing, failed or all", metavar="missing|failed|all")
]
UntilOption = Annotated[
    bool,
    typer.Option(
        "--until-decided",
        help="Cheap checks and small samples first; stop once the gate's verdict is decided",
    ),
]


def _version(value: bool) -> None:
    if value:
        print(f"kvbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """Options of every command."""


def _load(
    matrix: Path,
    overrides: list[str],
    select: str | None,
    data_dir: Path | None,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    from kvbench.data import fingerprint as data_fingerprint
    from kvbench.environment import host
    from kvbench.matrix import load
    from kvbench.models import fingerprint as model_fingerprint

    _check_data_dir(data_dir)
    here = host()
    loaded = load(
        matrix,
        overrides,
        select,
        host=here,
        fingerprint_model=model_fingerprint,
        fingerprint_data=lambda name, split: data_fingerprint(name, data_dir, split),
        sizes=sizes or {},
    )
    return loaded, here.environment


def _check_data_dir(data_dir: Path | None) -> None:
    from kvbench.corpora import HUB

    if data_dir is not None and str(data_dir) != HUB and not data_dir.is_dir():
        raise UsageError(
            f"The data folder {data_dir} does not exist; give a folder with the files that the README lists under "
            f"Daily use, or {HUB} to fetch them from the hub."
        )


def _rerun(value: str) -> Any:
    if value not in ("missing", "failed", "all"):
        raise UsageError(f"--rerun {value} is not known; use missing, failed or all.")
    return value


def _judge(run_dir: Path, gate: Path | None, as_json: bool) -> int:
    """Judge stored records, write the report, print the result; returns the exit code."""
    from kvbench import gate as gates
    from kvbench.metrics import METRICS, derive
    from kvbench.record import RunDir
    from kvbench.report.console import print_result
    from kvbench.report.jsonout import result_json
    from kvbench.report.write import write_all
    from kvbench.run import require_not_empty

    require_not_empty(run_dir)
    run = RunDir(run_dir)
    manifest, records = run.manifest(), list(run.records())
    named = gate or (_policy_of(run_dir, manifest["gate"]) if manifest["gate"] else None)
    policy = gates.load(named) if named else None
    try:
        rows = derive(manifest, records)
        verdict = gates.evaluate(policy, manifest, records, rows)
        definitions = {name: metric.definition for name, metric in METRICS.items()}
        paths = write_all(run_dir, manifest, records, rows, verdict, definitions)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise UsageError(unreadable(run_dir, e)) from e
    if as_json:
        print(json.dumps(result_json(manifest, records, rows, verdict), ensure_ascii=False, allow_nan=False))
    else:
        print_result(manifest, records, rows, verdict, paths)
    return int(verdict.exit_code)


def _policy_of(run_dir: Path, named: str) -> Path:
    """The gate that the run's matrix names, or, where that is not here, the copy that the run keeps."""
    kept = run_dir / KEPT_GATE
    return kept if kept.is_file() and not Path(named).is_file() else Path(named)


@app.command()
def run(
    matrix: MatrixArg,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    k: SelectOption = None,
    out: OutOption = None,
    gate: GateOption = None,
    data_dir: DataOption = None,
    rerun: RerunOption = "missing",
    until_decided: UntilOption = False,
    json_: JsonOption = False,
) -> None:
    """Measure a matrix, judge it, and write the report. The same command resumes an interrupted run."""
    with handled():
        from kvbench import gate as gates
        from kvbench.progress import watcher
        from kvbench.record import RunDir
        from kvbench.run import command_line
        from kvbench.run import run as run_matrix

        loaded, environment = _load(matrix, set_, k, data_dir)
        policy = gate or loaded.gate
        # A bad gate is a usage error now, not after the measuring.
        judged_by = gates.load(policy) if policy else None
        target = out or Path("runs") / loaded.name
        how = (data_dir, _rerun(rerun))
        if until_decided:
            from kvbench.untildecided import run_until_decided

            run_until_decided(
                loaded,
                judged_by,
                lambda sizes: _load(matrix, set_, k, data_dir, sizes)[0],
                RunDir(target),
                environment,
                command_line(),
                lambda: watcher(json_),
                *how,
            )
        else:
            run_matrix(loaded, RunDir(target), environment, command_line(), watcher(json_), *how)
        if policy is not None:
            from kvbench.report.write import write_text

            write_text(target / KEPT_GATE, policy.read_text(encoding="utf-8"))
        raise typer.Exit(_judge(target, policy, json_))


@app.command()
def plan(
    matrix: MatrixArg,
    set_: SetOption = [],  # noqa: B006
    k: SelectOption = None,
    out: OutOption = None,
    data_dir: DataOption = None,
    rerun: RerunOption = "missing",
    gate: GateOption = None,
    until_decided: UntilOption = False,
    json_: JsonOption = False,
) -> None:
    """Show cells, decisions with reasons, estimated bytes, what would be reused, and what the gate asks in vain. Runs nothing."""
    with handled():
        from kvbench import gate as gates
        from kvbench.plan import plan_cell, plan_json, plan_text
        from kvbench.record import RunDir
        from kvbench.run import plan_tasks

        loaded, environment = _load(matrix, set_, k, data_dir)
        tasks = plan_tasks(loaded, RunDir(out or Path("runs") / loaded.name), _rerun(rerun))
        policy = gates.load(gate or loaded.gate) if gate or loaded.gate else None
        cells = [plan_cell(cell) for cell in loaded.cells]
        looks, said = {}, []
        if until_decided:
            from kvbench import escalate

            planned = escalate.planned(loaded, policy)
            looks, said = escalate.about(planned), ["", *escalate.outline(planned)]
        if json_:
            print(json.dumps({**plan_json(loaded, cells, tasks, policy), **looks}, ensure_ascii=False))
        else:
            print("\n".join([plan_text(loaded, cells, tasks, environment, policy), *said]))


@app.command()
def gate(run_dir: RunArg, gate: GateOption = None, json_: JsonOption = False) -> None:
    """Judge a stored run again, without a model or torch. The exit code is the verdict."""
    with handled():
        raise typer.Exit(_judge(run_dir, gate, json_))


@app.command()
def report(run_dir: RunArg, gate: GateOption = None, json_: JsonOption = False) -> None:
    """Write the HTML and CSV reports of a stored run again. Exits 0 when they are written, whatever the verdict."""
    with handled():
        _judge(run_dir, gate, json_)


@app.command()
def quantize(
    model: Annotated[
        str, typer.Argument(help="A native checkpoint: folder, .gguf file, hub id or built-in name")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist yet, or be empty")],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="float32|bfloat16|float16",
            help="Of what stays native (default: the checkpoint's own, or bfloat16)",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Write a checkpoint with FP8 weights (E4M3, one scale a 128x128 block), for weights: fp8_block128."""
    with handled("nothing was written, run the same command to start again"):
        from kvbench.engine.quantize_checkpoint import quantize_checkpoint

        written = quantize_checkpoint(model, out, dtype)
        print(json.dumps(written.as_json(), ensure_ascii=False) if json_ else written.as_text())


@app.command("check-table")
def check_table(
    csv: Annotated[list[Path], typer.Argument(help="Published tables, e.g. reports/reference/fp8_itl.csv")],
    json_: JsonOption = False,
) -> None:
    """Check published tables: units, ratios, identities, what bytes and questions allow. Exits 1 when a rule finds something."""
    with handled("nothing was written, run the same command to start again"):
        from kvbench.published import read
        from kvbench.tablerules import RULES, as_json, as_text, check

        tables = [read(path) for path in csv]
        if json_:
            result = as_json(tables)
            print(json.dumps(result, ensure_ascii=False))
            raise typer.Exit(result["exit_code"])
        findings = [(table.path, finding) for table in tables for finding in check(table)]
        for path, finding in findings:
            print(as_text(path, finding))
        rows = sum(len(table.lines) for table in tables)
        print(f"Rows: {rows}; tables: {len(tables)}; rules: {len(RULES)}; findings: {len(findings)}.")
        raise typer.Exit(1 if findings else 0)


@app.command()
def selftest(
    fault: Annotated[
        list[str], typer.Option("--fault", metavar="NAME", help="Only this one; may be given again")
    ] = [],  # noqa: B006
    list_: Annotated[
        bool, typer.Option("--list", help="Show the faults and the known holes; runs nothing")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Break the engine on purpose, one fault at a time, and see whether the gate catches each. Exits 0 when it does."""
    with handled("nothing is kept of a self-test"):
        from kvbench.selftest.suite import listing, run_suite
        from kvbench.selftest.table import FAULTS, HOLES

        if list_:
            known = listing(FAULTS, HOLES)
            print(json.dumps(known, ensure_ascii=False) if json_ else "\n".join(row["line"] for row in known))
            return
        lines = sys.stderr if json_ else sys.stdout
        score = run_suite(FAULTS, fault, lambda result: print(result.line(), file=lines, flush=True))
        print(json.dumps(score.as_json(), ensure_ascii=False) if json_ else score.last_line())
        raise typer.Exit(score.exit_code)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A model, as a matrix names it")],
    out: Annotated[Path, typer.Argument(help="File of scales to write, OUT.json; it must not exist yet")],
    format_: Annotated[
        str,
        typer.Option(
            "--format", metavar="int8_static|fp8_e4m3_static", help="The format that the scales are for"
        ),
    ] = "int8_static",
    data: Annotated[str, typer.Option("--data", metavar="pydoc|wikitext2|FILE", help="The text")] = "pydoc",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens from its head")] = 4096,
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="amax|pXX.X", help="Largest |x|, or that percentile, over the largest code"
        ),
    ] = "amax",
    per: Annotated[
        str,
        typer.Option(
            "--per",
            metavar="layer|tensor",
            help="layer: one for K and one for V in each layer; tensor: one for all of K and one for all of V",
        ),
    ] = "layer",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="float32|bfloat16|float16", help="Of the engine that measures")
    ] = "float32",
    data_dir: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Measure K and V of a text and write the scales of a static KV format, for `scale: OUT.json` in a matrix."""
    with handled("nothing was written, run the same command to start again"):
        _check_data_dir(data_dir)
        from kvbench.engine.calibrate import calibrate as measure

        written = measure(
            model,
            out,
            fmt=format_,
            data=data,
            data_dir=data_dir,
            tokens=tokens,
            method=method,
            per=per,
            dtype=dtype,
        )
        print(json.dumps(written.as_json(), ensure_ascii=False) if json_ else written.as_text())


@app.command()
def schema(kind: Annotated[str, typer.Argument(help="matrix or gate")] = "matrix") -> None:
    """Print the JSON Schema of matrix or gate files, for editors."""
    with handled():
        from kvbench.schema import gate_schema, matrix_schema

        makers = {"matrix": matrix_schema, "gate": gate_schema}
        if kind not in makers:
            raise UsageError(f"There is no schema {kind!r}; use matrix or gate.")
        print(json.dumps(makers[kind](), indent=2, ensure_ascii=False))


def main() -> None:
    """Entry point of the `kvbench` script and of `python -m kvbench`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; the exit code still tells
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    app()


if __name__ == "__main__":
    main()
