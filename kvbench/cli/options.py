"""Options that several commands share, and what is checked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import completion
from kvbench.errors import UsageError

RERUNS = ("missing", "failed", "all")
EXECUTORS = ("inline", "local", "ray")

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
        help="Gate policy (default: the last one that judged the run, else the one its matrix names)",
        autocompletion=completion.gates,
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the verdict and the files; no progress")
]
DeviceOption = Annotated[
    bool | None,
    typer.Option(
        "--require-device/--no-require-device",
        help="Fail where cells need a device that is missing (default: in CI; elsewhere they are skipped, "
        "exit code 3)",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout")]
RerunOption = Annotated[
    str,
    typer.Option(
        "--rerun", help="Which tasks to measure again: missing, failed or all", metavar="|".join(RERUNS)
    ),
]
UntilOption = Annotated[
    bool,
    typer.Option(
        "--until-decided",
        help="Start with cheap checks and small samples; stop as soon as the verdict is certain",
    ),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Print what `kvbench plan` prints; run nothing")]
CanaryOption = Annotated[
    bool,
    typer.Option(
        "--canary",
        help="Measure exact bytes and evidence of each engine configuration first; stop if one is not as "
        "requested",
    ),
]
ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="|".join(EXECUTORS),
        help="Where cells are measured: in this process, each in a new process (with a GPU of its own), or "
        "on a "
        "Ray cluster",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", help="Cells at once with --executor local (default: one a GPU, one on a CPU)"),
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only the I-th of N shards of the matrix; see kvbench merge"),
]
OnlyOption = Annotated[
    list[str], typer.Option("--only", metavar="METRIC", help="Only this metric; repeatable: --only itl_ms")
]
MarginOption = Annotated[
    float | None,
    typer.Option(
        "--margin-pct",
        help="Largest difference that still counts as the same, in % (shares: in points), instead of the "
        "margins in "
        "docs/comparing.md; bytes stay exact",
    ),
]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the result as Markdown")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the result as one HTML page")
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
    if value not in RERUNS:
        raise UsageError(f"--rerun {value} is not known; use missing, failed or all.")
    return value


def folder_of(name: str, share: Any) -> Path:
    """The run directory without --out."""
    return Path("runs") / (f"{name}.shard-{share.shard.number}-of-{share.shard.of}" if share else name)
