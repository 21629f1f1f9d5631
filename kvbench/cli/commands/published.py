"""`kvbench check-table` and `kvbench reproduce`: published tables, checked and measured again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.exits import NOTHING_WRITTEN, handled
from kvbench.cli.loading import load_matrix
from kvbench.cli.options import DataOption, JsonOption, OutOption, SetOption


def check_table(
    csv: Annotated[list[Path], typer.Argument(help="Published tables, e.g. reports/reference/fp8_itl.csv")],
    json_: JsonOption = False,
) -> None:
    """Check published tables: units, ratios, identities, what bytes and questions allow. Exits 1 when a rule
    finds something."""
    with handled(NOTHING_WRITTEN):
        from kvbench.cli.output import show
        from kvbench.published.rules import RULES, as_json, as_text, check
        from kvbench.published.table import read

        tables = [read(path) for path in csv]
        findings = [as_text(table.path, finding) for table in tables for finding in check(table)]
        rows = sum(len(table.lines) for table in tables)
        counts = f"Rows: {rows}; tables: {len(tables)}; rules: {len(RULES)}; findings: {len(findings)}."
        show(json_, as_json(tables) if json_ else None, "\n".join([*findings, counts]))
        raise typer.Exit(1 if findings else 0)


if TYPE_CHECKING:
    from kvbench.published.catalogue import Reproduction
    from kvbench.report.compare.reproduction import Reproduced


def reproduce(
    source: Annotated[str | None, typer.Argument(help="int8_sym, int8_static or fp8")] = None,
    table: Annotated[str | None, typer.Argument(help="Its table; --list shows them")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the tables and what each needs")] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Compare a stored run; measure nothing")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Another model than the default one")] = None,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    out: OutOption = None,
    data_dir: DataOption = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the comparison as Markdown")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Measure what a published table states and compare its shape: sign, order, ratio. Exits 0 when it
    agrees, 1 when it differs, 3 when it was not measured, 4 when there is too little data.

    Example: kvbench reproduce fp8 kv-bytes
    """
    with handled():
        from kvbench.cli.output import show
        from kvbench.errors import UsageError
        from kvbench.files import write_file
        from kvbench.published.catalogue import TABLES, named
        from kvbench.report.compare.reproduction import as_json, as_markdown, as_text

        if list_:
            known = {name.replace("/", " "): found.needs or "cannot be run" for name, found in TABLES.items()}
            show(json_, known, "\n".join(f"{name:24}{needs}" for name, needs in known.items()))
            return
        if source is None or table is None:
            raise UsageError(
                "Name a source and a table, as in kvbench reproduce fp8 kv-bytes; --list shows them."
            )
        if from_ is not None and (model or set_):
            raise UsageError(
                f"--from {from_} compares a stored run, so --model and --set have no effect; remove them, "
                f"or remove "
                "--from to measure."
            )
        done = _reproduced(
            f"{source} {table}", named(source, table), from_, model, set_, out, data_dir, json_
        )
        if markdown is not None:
            write_file(markdown, as_markdown(done))
        show(json_, as_json(done), lambda: as_text(done))
        raise typer.Exit(done.exit_code)


def _reproduced(
    name: str,
    found: Reproduction,
    stored: Path | None,
    model: str | None,
    overrides: list[str],
    out: Path | None,
    data_dir: Path | None,
    quiet: bool,
) -> Reproduced:
    from kvbench.gate import evaluate as gates
    from kvbench.gate.verdict import FAIL
    from kvbench.metrics.collect import derive
    from kvbench.published.catalogue import files
    from kvbench.published.reproduce import Ours, compare
    from kvbench.published.table import read
    from kvbench.records.run import RunDir
    from kvbench.report.compare.reproduction import Reproduced, hardware_of

    reference, matrix = files(found)
    published = read(reference)
    words = ["kvbench", "reproduce", *name.split()]
    words += ["--model", model] if model else []
    command = shlex.join([*words, *(word for text in overrides for word in ("--set", text))])
    if stored is None and matrix is not None:
        stored = _measure(found, matrix, name, model, overrides, out, data_dir, quiet)
    if stored is None:
        return Reproduced(
            name, published, compare(published.lines, found.rules, {}, Ours([], [])), "", "", "", command
        )
    run = RunDir(stored).load()
    rows = derive(run)
    verdict = gates.evaluate(None, run, rows)
    faults = tuple(f"{o.check}: {o.sentence}" for o in verdict.outcomes if o.status == FAIL)
    ours = Ours(run.manifest.cells, rows)
    shape = compare(published.lines, found.rules, found.stand_ins, ours)
    specs = list(ours.specs.values())
    backends = [r.decision["backend"]["resolved"] for r in run.records if r.decision]
    names = list(dict.fromkeys(str(spec["model"]) for spec in specs))
    models = ", ".join(names)
    usual = all(name in re.findall(r"[\w./-]+", found.ours) for name in names)
    stands_in = "" if not found.ours else found.ours if usual else f"{models}, as the run has it"
    return Reproduced(
        name,
        published,
        shape,
        hardware_of(run.manifest.environment, specs, backends),
        models,
        stands_in,
        command,
        faults,
    )


def _measure(
    found: Reproduction,
    matrix: Path,
    name: str,
    model: str | None,
    overrides: list[str],
    out: Path | None,
    data_dir: Path | None,
    quiet: bool,
) -> Path:
    from kvbench.errors import UsageError
    from kvbench.records.run import RunDir
    from kvbench.run.execute import command_line
    from kvbench.run.execute import run as run_matrix
    from kvbench.run.progress import watcher

    if model and found.stand_ins:
        raise UsageError(
            f"{name} has several models, each with one of its own here: "
            f"{', '.join(found.stand_ins.values())}; leave --model out."
        )
    words: list[Any] = [*([f"model={json.dumps(model)}"] if model else []), *overrides]
    loaded, environment = load_matrix(matrix, words, None, data_dir)
    target = out or Path("runs") / loaded.name
    run_matrix(loaded, RunDir(target), environment, command_line(), watcher(quiet), data_dir)
    return target
