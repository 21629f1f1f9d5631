"""`kvbench check-table` and `kvbench reproduce`: published tables, checked and measured again."""

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from kvbench.cli import options
from kvbench.cli.loading import load_matrix
from kvbench.cli.output import NOTHING_WRITTEN, handled, show
from kvbench.errors import UsageError


def check_table(
    csv: Annotated[list[Path], Argument(help="Published tables, e.g. reports/reference/fp8_itl.csv")],
    json_: options.Json = False,
) -> None:
    """Check published tables: units, ratios, identities, what bytes allow. Exits 1 for a finding."""
    with handled(NOTHING_WRITTEN):
        from kvbench.published.rules import RULES, as_json, as_text, check
        from kvbench.published.table import read

        tables = [read(path) for path in csv]
        findings = [as_text(table.path, finding) for table in tables for finding in check(table)]
        rows = sum(len(table.lines) for table in tables)
        counts = f"Rows: {rows}; tables: {len(tables)}; rules: {len(RULES)}; findings: {len(findings)}."
        show(json_, as_json(tables) if json_ else None, "\n".join([*findings, counts]))
        raise Exit(1 if findings else 0)


def reproduce(
    source: Annotated[str | None, Argument(help="int8_sym, int8_static or fp8")] = None,
    table: Annotated[str | None, Argument(help="Its table; --list shows them")] = None,
    list_: Annotated[bool, Option("--list", help="Show the tables and what each needs")] = False,
    from_: Annotated[
        Path | None, Option("--from", metavar="RUN", help="Compare a stored run; measure nothing")
    ] = None,
    model: Annotated[str | None, Option("--model", help="Another model than the default one")] = None,
    set_: options.Set = [],  # noqa: B006 (typer reads the default, nothing mutates it)
    out: options.Out = None,
    data_dir: options.Data = None,
    markdown: Annotated[
        Path | None, Option("--markdown", metavar="FILE", help="Also write the comparison as Markdown")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Measure what a published table states and compare its shape: sign, order, ratio. Exits 0 when it
    agrees, 1 when it differs, 3 when it was not measured, 4 when there is too little data.

    Example: kvbench reproduce fp8 kv-bytes
    """
    with handled():
        from kvbench.files import write_file
        from kvbench.published.catalogue import TABLES, files, named
        from kvbench.records.run import RunDir
        from kvbench.report.compare.reproduction import as_json, as_markdown, as_text
        from kvbench.run import execute
        from kvbench.run.progress import watcher

        if list_:
            known = {name.replace("/", " "): found.needs or "cannot be run" for name, found in TABLES.items()}
            show(json_, known, "\n".join(f"{name:24}{needs}" for name, needs in known.items()))
            return
        if source is None or table is None:
            raise UsageError("Name a source and a table, as in kvbench reproduce fp8 kv-bytes; see --list.")
        if from_ is not None and (model or set_):
            raise UsageError(
                f"--from {from_} compares a stored run, so --model and --set have no effect; remove them, or "
                "remove --from to measure."
            )
        name, found = f"{source} {table}", named(source, table)
        stored, (_, matrix) = from_, files(found)
        if stored is None and matrix is not None:
            if model and found.stand_ins:
                raise UsageError(
                    f"{name} has several models, each with one of its own here: "
                    f"{', '.join(found.stand_ins.values())}; leave --model out."
                )
            words = [*([f"model={json.dumps(model)}"] if model else []), *set_]
            loaded, here = load_matrix(matrix, words, None, data_dir)
            stored = out or Path("runs") / loaded.name
            execute.run(loaded, execute.Setup(RunDir(stored), here, lambda: watcher(json_), data_dir))
        arguments = [*(["--model", model] if model else []), *(w for text in set_ for w in ("--set", text))]
        again = shlex.join(["kvbench", "reproduce", source, table, *arguments])
        done = _reproduced(name, found, stored, again)
        if markdown is not None:
            write_file(markdown, as_markdown(done))
        show(json_, as_json(done), lambda: as_text(done))
        raise Exit(done.exit_code)


def _reproduced(name: str, found: Any, stored: Path | None, command: str) -> Any:
    """The published table beside a stored run; stored: None where the table cannot be measured."""
    from kvbench.gate import evaluate as gates
    from kvbench.gate.verdict import FAIL
    from kvbench.metrics.collect import derive
    from kvbench.published.catalogue import files
    from kvbench.published.reproduce import Ours, compare
    from kvbench.published.table import read
    from kvbench.records.run import RunDir
    from kvbench.report.compare.reproduction import Reproduced, hardware_of

    published = read(files(found)[0])
    if stored is None:
        shape = compare(published.lines, found.rules, {}, Ours([], []))
        return Reproduced(name, published, shape, "", "", "", command)
    run = RunDir(stored).load()
    rows = derive(run)
    outcomes = gates.evaluate(None, run, rows).outcomes
    faults = tuple(f"{o.check}: {o.sentence}" for o in outcomes if o.status == FAIL)
    ours = Ours(run.manifest.cells, rows)
    shape = compare(published.lines, found.rules, found.stand_ins, ours)
    specs = list(ours.specs.values())
    backends = [r.decision["backend"]["resolved"] for r in run.records if r.decision]
    hardware = hardware_of(run.manifest.environment, specs, backends)
    names = list(dict.fromkeys(str(spec["model"]) for spec in specs))
    models = ", ".join(names)
    usual = all(name in re.findall(r"[\w./-]+", found.ours) for name in names)
    stands_in = "" if not found.ours else found.ours if usual else f"{models}, as the run has it"
    return Reproduced(name, published, shape, hardware, models, stands_in, command, faults)
