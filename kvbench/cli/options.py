"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvbench.cli import completion

RERUNS = ("missing", "failed", "all")
EXECUTORS = ("inline", "local", "ray")
DTYPES = "float32|bfloat16|float16"

Matrix = Annotated[
    Path, Argument(help="YAML matrix, e.g. matrices/int8.yaml", autocompletion=completion.matrices)
]
Run = Annotated[Path, Argument(help="Run directory that `kvbench run` wrote", autocompletion=completion.runs)]
Set = Annotated[
    list[str], Option("--set", metavar="KEY=VALUE", help="Override a key: --set runners.latency.repeats=5")
]
Select = Annotated[
    str | None, Option("-k", metavar="EXPR", help="Keep cells by name: -k 'int8_sym and not batch=4'")
]
Data = Annotated[
    Path | None, Option("--data-dir", envvar="KVBENCH_DATA_DIR", help="Folder of the evaluation data")
]
Out = Annotated[Path | None, Option("--out", help="Run directory (default: runs/ and the matrix's name)")]
_JUDGED = "Gate policy (default: the last one that judged the run, else the one its matrix names)"
_NAMED = "Gate policy (default: the one the matrix names)"
Gate = Annotated[Path | None, Option("--gate", help=_NAMED, autocompletion=completion.gates)]
Judge = Annotated[Path | None, Option("--gate", help=_JUDGED, autocompletion=completion.gates)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the verdict and the files; no progress")]
_MISSING = (
    "Fail where cells need a device that is missing (default: in CI; elsewhere they are skipped, exit code 3)"
)
Device = Annotated[
    bool | None, Option("--require-device/--no-require-device", help=_MISSING, show_default=False)
]
Json = Annotated[bool, Option("--json", help="Print the result as JSON on stdout")]
_RERUN = "Which tasks to measure again: missing, failed or all"
Rerun = Annotated[str, Option("--rerun", help=_RERUN, metavar="|".join(RERUNS))]
_DECIDED = "Start with cheap checks and small samples; stop as soon as the verdict is certain"
Until = Annotated[bool, Option("--until-decided", help=_DECIDED)]
Dry = Annotated[bool, Option("--dry-run", help="Print what `kvbench plan` prints; run nothing")]
_CANARY = (
    "Measure exact bytes and evidence of each engine configuration first; stop if one is not as requested"
)
Canary = Annotated[bool, Option("--canary", help=_CANARY)]
_WHERE = (
    "Where cells are measured: in this process, each in a new process (with a GPU of its own), or on a "
    "Ray cluster"
)
Executor = Annotated[str, Option("--executor", metavar="|".join(EXECUTORS), help=_WHERE)]
Jobs = Annotated[
    int | None,
    Option("--jobs", help="Cells at once with --executor local (default: one a GPU, one on a CPU)"),
]
Shard = Annotated[
    str | None,
    Option("--shard", metavar="I/N", help="Only the I-th of N shards of the matrix; see kvbench merge"),
]
Only = Annotated[
    list[str], Option("--only", metavar="METRIC", help="Only this metric; repeatable: --only itl_ms")
]
_LARGEST = (
    "Largest difference that still counts as the same, in % (shares: in points), instead of the margins in "
    "docs/comparing.md; bytes stay exact"
)
Margin = Annotated[float | None, Option("--margin-pct", help=_LARGEST)]
Markdown = Annotated[
    Path | None, Option("--markdown", metavar="FILE", help="Also write the result as Markdown")
]
Html = Annotated[Path | None, Option("--html", metavar="FILE", help="Also write the result as one HTML page")]
