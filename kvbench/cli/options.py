"""Options that several commands share, and what is checked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import completion
from kvbench.errors import UsageError

MatrixArg = Annotated[
    Path, typer.Argument(help="YAML matrix, e.g. matrices/int8.yaml", autocompletion=completion.matrices)
]
RunArg = Annotated[
    Path, typer.Argument(help="Run directory that `kvbench run` wrote", autocompletion=completion.runs)
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set runners.latency.repeats=5"),
]
SelectOption = Annotated[
    str | None, typer.Option("-k", metavar="EXPR", help="Keep cells by name: -k 'int8_sym and not batch=4'")
]
DataOption = Annotated[
    Path | None, typer.Option("--data-dir", envvar="KVBENCH_DATA_DIR", help="Folder of the evaluation data")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Run directory (default: runs/ and the matrix's name)")
]
GateOption = Annotated[
    Path | None,
    typer.Option(
        "--gate", help="Gate policy (default: the one the matrix names)", autocompletion=completion.gates
    ),
]
JudgeOption = Annotated[
    Path | None,
    typer.Option(
        "--gate",
        help="Gate policy (default: the one that judged the run last, else the one its matrix names)",
        autocompletion=completion.gates,
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the verdict and the files only; no progress")
]
DeviceOption = Annotated[
    bool | None,
    typer.Option(
        "--require-device/--no-require-device",
        help="Fail where cells ask for a device that is not here (default: in CI; elsewhere they are "
        "skipped, exit code 3)",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout")]
RerunOption = Annotated[
    str, typer.Option("--rerun", help="missing, failed or all", metavar="missing|failed|all")
]
UntilOption = Annotated[
    bool,
    typer.Option(
        "--until-decided",
        help="Cheap checks and small samples first; stop once the gate's verdict is decided",
    ),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Print what `kvbench plan` prints; run nothing")]
CanaryOption = Annotated[
    bool,
    typer.Option(
        "--canary",
        help="Exact bytes and evidence of each engine configuration first; stop if one is not what was "
        "requested",
    ),
]


def check_data_dir(data_dir: Path | None) -> None:
    from kvbench.data.corpora import HUB

    if data_dir is not None and str(data_dir) != HUB and not data_dir.is_dir():
        raise UsageError(
            f"The data folder {data_dir} does not exist; give a folder with the files that docs/matrices.md "
            f"lists "
            f"under Evaluation data, or {HUB} to fetch them from the hub."
        )


def rerun_of(value: str) -> Any:
    if value not in ("missing", "failed", "all"):
        raise UsageError(f"--rerun {value} is not known; use missing, failed or all.")
    return value
