"""`kvbench schema`: JSON Schema for editors and readers."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvbench.cli.exits import handled
from kvbench.errors import UsageError


def schema(
    kind: Annotated[str, typer.Argument(help="matrix, gate, record, manifest or results")] = "matrix",
) -> None:
    """Print the JSON Schema of matrix or gate files, for editors, or of the files of a run."""
    with handled():
        from kvbench.gate.policy import gate_schema
        from kvbench.matrix.parse import matrix_schema
        from kvbench.records.schema import manifest_schema, record_schema
        from kvbench.report.json import results_schema

        makers = {
            "matrix": matrix_schema,
            "gate": gate_schema,
            "record": record_schema,
            "manifest": manifest_schema,
            "results": results_schema,
        }
        if kind not in makers:
            raise UsageError(f"Unknown schema {kind!r}; use {', '.join(makers)}.")
        print(json.dumps(makers[kind](), indent=2, ensure_ascii=False))
