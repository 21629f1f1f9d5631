"""`kvbench init`: a first matrix and gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.completion import kv_formats, models
from kvbench.cli.exits import handled


def init(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE", help="Folder for matrix.yaml and gate.yaml, or a matrix file FILE.yaml"
        ),
    ] = Path("."),
    model: Annotated[
        str, typer.Option("--model", help="A model, as a matrix names it", autocompletion=models)
    ] = "smollm2-135m-instruct",
    format_: Annotated[
        str, typer.Option("--format", help="The KV format to compare with native", autocompletion=kv_formats)
    ] = "int8_sym",
) -> None:
    """Write a commented matrix, its gate, and the JSON Schemas with which editors complete both. Overwrites
    nothing."""
    with handled("run the same command to start again"):
        from kvbench.preflight.init import write

        matrix, *others = write(target, model, format_)
        print("\n".join(str(path) for path in (matrix, *others)))
        print(f"Next: kvbench validate {matrix} && kvbench run {matrix}")
