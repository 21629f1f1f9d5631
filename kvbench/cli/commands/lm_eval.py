"""`kvbench lm-eval`: lm-evaluation-harness's own command line, with the model `kvbench`."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from kvbench.cli.exits import handled


def lm_eval(ctx: typer.Context) -> None:
    """Run lm-evaluation-harness with the model kvbench. Accepts all of its arguments, as in kvbench lm-eval
    --model kvbench --model_args ..."""
    with handled("nothing was written"):
        if find_spec("lm_eval") is None:
            from kvbench.errors import UsageError

            raise UsageError(
                "lm-evaluation-harness is not installed; install the extra: pip install 'kvbench[lm-eval]'."
            )
        from kvbench.lm_eval.model import main

        main(ctx.args)
