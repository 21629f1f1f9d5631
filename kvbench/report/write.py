"""The report's files, each written completely or not at all."""

import json
from pathlib import Path

from kvbench.files import write_file
from kvbench.report import html, junit, markdown, tables
from kvbench.report import json as jsonout
from kvbench.report.model import JudgedRun
from kvbench.report.view import View, build


def write_all(run_dir: Path, run: JudgedRun, view: View | None = None) -> list[Path]:
    """Write the page, both tables as CSV and Parquet, JSON, JUnit and Markdown.

    view: `build` of the same run, if the caller has it. Returns the paths, the page first.
    """
    view = view or build(run)
    long, wide = tables.long_table(run), tables.wide_table(run)
    data = json.dumps(jsonout.result_json(run), ensure_ascii=False, allow_nan=False, indent=1)
    files: dict[str, str | bytes] = {
        "report.html": html.render(view),
        "results_long.csv": tables.as_csv(long),
        "results_wide.csv": tables.as_csv(wide),
        "results.json": f"{data}\n",
        "report.md": markdown.report(view, run),
        "results_long.parquet": tables.as_parquet(long, run, "long"),
        "results_wide.parquet": tables.as_parquet(wide, run, "wide"),
        "report.junit.xml": junit.junit_xml(run),  # last: a CI system that finds it finds the other files too
    }
    return [write_file(run_dir / name, content) for name, content in files.items()]
