"""`kvbench check-table`: published tables held to their own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exits import handled
from kvbench.cli.options import JsonOption


def check_table(
    csv: Annotated[list[Path], typer.Argument(help="Published tables, e.g. reports/reference/fp8_itl.csv")],
    json_: JsonOption = False,
) -> None:
    """Check published tables: units, ratios, identities, what bytes and questions allow. Exits 1 when a rule finds something."""
    with handled("nothing was written, run the same command to start again"):
        from kvbench.published.rules import RULES, as_json, as_text, check
        from kvbench.published.table import read

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
