"""What runs the engine outside a matrix: `kvbench calibrate`, `quantize`, `selftest` and `lm-eval`."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Exit, Option

from kvbench.cli import completion, options
from kvbench.cli.loading import check_data_dir
from kvbench.cli.output import NOTHING_WRITTEN, handled, show
from kvbench.errors import UsageError

_PER = "layer: one for K and one for V in each layer; tensor: one for all of K and one for all of V"
_METHOD = "Largest |x|, or that percentile, over the largest code"
_NATIVE = "Dtype of the tensors that stay native (default: the checkpoint's own, or bfloat16)"
_CHECKPOINT = "A native checkpoint: folder, .gguf file, hub id or built-in name"


def calibrate(
    model: Annotated[str, Argument(help="A model, as a matrix names it", autocompletion=completion.models)],
    out: Annotated[Path, Argument(help="Scale file to write, OUT.json; it must not exist yet")],
    format_: Annotated[
        str, Option("--format", metavar="int8_static|fp8_e4m3_static", help="The format of the scales")
    ] = "int8_static",
    data: Annotated[str, Option("--data", metavar="pydoc|wikitext2|FILE", help="The text")] = "pydoc",
    tokens: Annotated[int, Option("--tokens", help="Tokens from its start")] = 4096,
    method: Annotated[str, Option("--method", metavar="amax|pXX.X", help=_METHOD)] = "amax",
    per: Annotated[str, Option("--per", metavar="layer|tensor", help=_PER)] = "layer",
    dtype: Annotated[
        str, Option("--dtype", metavar=options.DTYPES, help="Dtype of the engine that measures")
    ] = "float32",
    data_dir: options.Data = None,
    json_: options.Json = False,
) -> None:
    """Measure K and V of a text and write a static KV format's scales, for `scale: OUT.json` in a matrix."""
    with handled(NOTHING_WRITTEN):
        check_data_dir(data_dir)
        from kvbench.engines.reference.kv import calibrate as calibration

        how: dict[str, Any] = {"tokens": tokens, "method": method, "per": per, "dtype": dtype}
        written = calibration.calibrate(model, out, fmt=format_, data=data, data_dir=data_dir, **how)
        show(json_, written.as_json(), written.as_text())


def quantize(
    model: Annotated[str, Argument(help=_CHECKPOINT, autocompletion=completion.models)],
    out: Annotated[Path, Argument(help="Folder to write; it must not exist yet, or be empty")],
    dtype: Annotated[str | None, Option("--dtype", metavar=options.DTYPES, help=_NATIVE)] = None,
    json_: options.Json = False,
) -> None:
    """Write a checkpoint for weights: fp8_block128 (E4M3, one scale for each 128x128 block)."""
    with handled(NOTHING_WRITTEN):
        from kvbench.engines.reference.weights.quantize_checkpoint import quantize_checkpoint

        written = quantize_checkpoint(model, out, dtype)
        show(json_, written.as_json(), written.as_text())


def selftest(
    fault: Annotated[list[str], Option("--fault", metavar="NAME", help="Only this fault; repeatable")] = [],  # noqa: B006
    list_: Annotated[bool, Option("--list", help="Show the faults and the known holes; run nothing")] = False,
    json_: options.Json = False,
) -> None:
    """Break the engine on purpose, one fault at a time. Exits 0 when the gate catches each."""
    with handled("nothing of a self-test is kept"):
        from kvbench.selftest.suite import listing, run_suite
        from kvbench.selftest.table import FAULTS, HOLES

        if list_:
            known = listing(FAULTS, HOLES)
            show(json_, known, "\n".join(row["line"] for row in known))
            return
        lines = sys.stderr if json_ else sys.stdout
        score = run_suite(FAULTS, fault, lambda result: print(result.line(), file=lines, flush=True))
        show(json_, score.as_json(), score.last_line())
        raise Exit(score.exit_code)


def lm_eval(ctx: Context) -> None:
    """Run lm-evaluation-harness with the model kvbench. Accepts all of its arguments, as in kvbench lm-eval
    --model kvbench --model_args ..."""
    with handled("nothing was written"):
        if find_spec("lm_eval") is None:
            raise UsageError(
                "lm-evaluation-harness is not installed; install the extra: pip install 'kvbench[lm-eval]'."
            )
        from kvbench.lm_eval.model import main

        main(ctx.args)
