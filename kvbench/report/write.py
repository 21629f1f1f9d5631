"""The report's files, each written completely or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvbench.report import csv, html, junit, markdown, parquet
from kvbench.report import json as jsonout
from kvbench.report.model import JudgedRun
from kvbench.report.view import View, build


def write_all(run_dir: Path, run: JudgedRun, view: View | None = None) -> list[Path]:
    """Write the page, both tables as CSV and Parquet, JSON, JUnit and Markdown.

    view: `build` of the same run, if the caller has it. Returns the paths, the page first.
    """
    view = view or build(run)
    data = json.dumps(jsonout.result_json(run), ensure_ascii=False, allow_nan=False, indent=1)
    files: dict[str, str | bytes] = {
        "report.html": html.render(view),
        "results_long.csv": csv.long_csv(run),
        "results_wide.csv": csv.wide_csv(run),
        "results.json": f"{data}\n",
        "report.md": markdown.report(view, run),
        "results_long.parquet": parquet.long_parquet(run),
        "results_wide.parquet": parquet.wide_parquet(run),
        "report.junit.xml": junit.junit_xml(run),  # last: a CI system that finds it finds the other files too
    }
    return [write_file(run_dir / name, content) for name, content in files.items()]


def write_file(path: Path, content: str | bytes) -> Path:
    return write_text(path, content) if isinstance(content, str) else write_bytes(path, content)


def write_text(path: Path, text: str) -> Path:
    """Write text; lone surrogates (from a broken file name), which UTF-8 does not have, become `?`."""
    return write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, data: bytes) -> Path:
    """Write with a temp file, fsync and rename: a reader sees the old file or the new one."""
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
