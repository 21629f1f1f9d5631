"""The report's files, each written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvbench.report import csv, html, junit, markdown, parquet
from kvbench.report import json as jsonout
from kvbench.report.model import JudgedRun
from kvbench.report.view import View, build


def write_all(run_dir: Path, run: JudgedRun, view: View | None = None) -> list[Path]:
    """Write the report's files into the run directory: the page, both tables as CSV and Parquet, JSON, JUnit and Markdown.

    view: `build` of the same run, where the caller has it. Returns the paths, the page first.
    """
    view = view or build(run)
    data = json.dumps(jsonout.result_json(run), ensure_ascii=False, allow_nan=False, indent=1)
    texts = {
        "report.html": html.render(view),
        "results_long.csv": csv.long_csv(run),
        "results_wide.csv": csv.wide_csv(run),
        "results.json": f"{data}\n",
        "report.md": markdown.report(view, run),
    }
    suite = junit.junit_xml(run)
    tables = {
        "results_long.parquet": parquet.long_parquet(run),
        "results_wide.parquet": parquet.wide_parquet(run),
    }
    return [
        *(write_text(run_dir / name, text) for name, text in texts.items()),
        *(write_bytes(run_dir / name, table) for name, table in tables.items()),
        write_text(
            run_dir / "report.junit.xml", suite
        ),  # last: a CI system that finds it finds a whole report
    ]


def write_text(path: Path, text: str) -> Path:
    """Characters that UTF-8 cannot hold (lone surrogates out of a broken file name) are written as `?`."""
    return write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, data: bytes) -> Path:
    """Temp file, fsync, rename: a reader sees the old file or the new one."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    return path
