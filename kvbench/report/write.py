"""The report's files, each written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.metrics import Row
from kvbench.record import Record
from kvbench.report import csv, html, jsonout
from kvbench.report.model import Run, VerdictLike
from kvbench.report.view import build


def write_all(run_dir: Path, manifest: Mapping[str, Any], records: Sequence[Record], rows: Sequence[Row],
              verdict: VerdictLike, definitions: Mapping[str, str] | None = None) -> list[Path]:  # fmt: skip
    """Write report.html, results_long.csv, results_wide.csv and results.json into the run directory.

    definitions: metric name to what it is, shown at the end of the page. Returns the paths, the page first.
    """
    run = Run(manifest, records, rows, verdict)
    data = json.dumps(
        jsonout.result_json(manifest, records, rows, verdict), ensure_ascii=False, allow_nan=False, indent=1
    )
    texts = {
        "report.html": html.render(build(manifest, records, rows, verdict, definitions)),
        "results_long.csv": csv.long_csv(run),
        "results_wide.csv": csv.wide_csv(run),
        "results.json": f"{data}\n",
    }
    return [write_text(run_dir / name, text) for name, text in texts.items()]


def write_text(path: Path, text: str) -> Path:
    """Temp file, fsync, rename: a reader sees the old file or the new one. Characters that UTF-8 cannot hold
    (lone surrogates out of a broken file name) are written as `?`.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("w", encoding="utf-8", errors="replace", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    return path
