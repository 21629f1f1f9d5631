"""`kvbench schema`: JSON Schema for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvbench.errors import UsageError
from kvbench.exits import handled


def schema(kind: Annotated[str, typer.Argument(help="matrix or gate")] = "matrix") -> None:
    """Print the JSON Schema of matrix or gate files, for editors."""
    with handled():
        from kvbench.schema import gate_schema, matrix_schema

        makers = {"matrix": matrix_schema, "gate": gate_schema}
        if kind not in makers:
            raise UsageError(f"There is no schema {kind!r}; use matrix or gate.")
        print(json.dumps(makers[kind](), indent=2, ensure_ascii=False))
