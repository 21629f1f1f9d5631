"""`kvbench quantize`: writes a checkpoint with FP8 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.completion import models
from kvbench.cli.exits import handled
from kvbench.cli.options import JsonOption


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="A native checkpoint: folder, .gguf file, hub id or built-in name", autocompletion=models
        ),
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
        from kvbench.engines.reference.weights.quantize_checkpoint import quantize_checkpoint

        written = quantize_checkpoint(model, out, dtype)
        print(json.dumps(written.as_json(), ensure_ascii=False) if json_ else written.as_text())
