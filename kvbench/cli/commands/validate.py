"""`kvbench validate`: whether matrices can run completely, and answer their gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.completion import policies
from kvbench.cli.exits import handled
from kvbench.cli.loading import load_matrix, policy_for
from kvbench.cli.options import DataOption, GateOption, JsonOption, SelectOption, SetOption
from kvbench.errors import KvbenchError, UsageError


def validate(
    files: Annotated[
        list[Path], typer.Argument(help="Matrices and gates, in any order", autocompletion=policies)
    ],
    set_: SetOption = [],  # noqa: B006
    k: SelectOption = None,
    data_dir: DataOption = None,
    gate: GateOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="cpu|cuda", help="What device: auto means, instead of this machine's"
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Check matrices and gates: keys, model config, data, shape rules of the kernels, and whether the matrix
    answers its gate. Loads no model and needs no GPU. Exits 0 when all of it can run, else 2."""
    with handled("nothing was written"):
        from kvbench.cli.output import show
        from kvbench.data.fingerprint import fingerprint
        from kvbench.gate import policy
        from kvbench.preflight import validate as validation

        if device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {device} is not known; use cpu or cuda.")

        def found(path: Path) -> validation.Finding:
            kind = validation.kind_of(path)
            try:
                if kind == validation.GATE:
                    return validation.of_gate(policy.load(path))
                loaded, environment = load_matrix(path, set_, k, data_dir, device=device)
                judged_by = policy_for(gate, loaded)
                return validation.of_matrix(
                    loaded, judged_by, lambda name, split: fingerprint(name, data_dir, split), environment
                )
            except KvbenchError as e:
                return validation.of_error(path, kind, e)

        all_ = [found(path) for path in files]
        code = 2 if any(one.problems for one in all_) else 0
        answer = {"files": [one.as_json() for one in all_], "exit_code": code}
        show(json_, answer, "\n".join(one.as_text() for one in all_))
        raise typer.Exit(code)
