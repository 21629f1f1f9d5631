"""`kvbench calibrate` and `kvbench quantize`: static scales, and FP8 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.completion import models
from kvbench.cli.exits import NOTHING_WRITTEN, handled
from kvbench.cli.options import DataOption, JsonOption, check_data_dir

DTYPES = "float32|bfloat16|float16"


def calibrate(
    model: Annotated[str, typer.Argument(help="A model, as a matrix names it", autocompletion=models)],
    out: Annotated[Path, typer.Argument(help="Scale file to write, OUT.json; it must not exist yet")],
    format_: Annotated[
        str, typer.Option("--format", metavar="int8_static|fp8_e4m3_static", help="The format of the scales")
    ] = "int8_static",
    data: Annotated[str, typer.Option("--data", metavar="pydoc|wikitext2|FILE", help="The text")] = "pydoc",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens from its start")] = 4096,
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
            help="layer: one for K and one for V in each layer; tensor: one for all of K and one for all of "
            "V",
        ),
    ] = "layer",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar=DTYPES, help="Dtype of the engine that measures")
    ] = "float32",
    data_dir: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Measure K and V of a text and write the scales of a static KV format, for `scale: OUT.json` in a
    matrix."""
    with handled(NOTHING_WRITTEN):
        check_data_dir(data_dir)
        from kvbench.cli.output import show
        from kvbench.engines.reference.kv.calibrate import calibrate as measure

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
        show(json_, written.as_json(), written.as_text())


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
            metavar=DTYPES,
            help="Dtype of the tensors that stay native (default: the checkpoint's own, or bfloat16)",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Write a checkpoint with FP8 weights (E4M3, one scale for each 128x128 block), for weights:
    fp8_block128."""
    with handled(NOTHING_WRITTEN):
        from kvbench.cli.output import show
        from kvbench.engines.reference.weights.quantize_checkpoint import quantize_checkpoint

        written = quantize_checkpoint(model, out, dtype)
        show(json_, written.as_json(), written.as_text())
