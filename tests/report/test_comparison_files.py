"""Comparison and history as files and on the command line: whole, self-contained, safe for any names."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.compare.history import history
from kvbench.compare.two_runs import compare
from kvbench.report.compare import timeline
from kvbench.report.compare import two_runs as comparison
from kvbench.report.compare.timeline import plots
from kvbench.report.markdown import escaped
from tests.factories.runs.compared import latency, on_disk, perplexity, stored
from tests.report.parsed import alone

HOSTILE = [
    "<script>alert(1)</script></style><img src=x onerror=alert(1)>{{ 7*7 }}&amp;'\"",
    "a|b\n## c `d` [e](http://f) @g =cmd|' /C calc'!A1",
    "\u202eabc\x1b[31m" + "長" * 50 + "x" * 500,
]


def kvbench(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def before(tmp_path):
    return on_disk(stored(latency(1.05, repeats=40)), tmp_path / "before")


@pytest.fixture
def after(tmp_path):
    run = stored(latency(1.12, machine=1.04, repeats=40, seed=1), created_at="2026-01-02T00:00:00+00:00")
    return on_disk(run, tmp_path / "after")


def test_a_slower_run_ends_with_1_and_every_format_has_the_sentence(before, after, tmp_path):
    page, notes = tmp_path / "c.html", tmp_path / "c.md"
    result = kvbench("compare", before, after, "--only", "itl_ms", "--html", page, "--markdown", notes)
    html, markdown = (path.read_text(encoding="utf-8") for path in (page, notes))
    assert result.exit_code == 1, result.output
    sentence = re.search(r"B: int8_sym: itl_ms is [\d.]+% slower \[[\d.]+, [\d.]+\], 40 pairs", result.output)
    assert "WORSE" in result.output
    assert sentence.group() in alone(html).text
    assert escaped(sentence.group()) in markdown
    for text in (result.output, html, markdown):
        assert re.search(r"slower\s+\S?\[[\d.]+, [\d.]+\S?\]\s+relative\s+to\s+native", text)
    quiet = kvbench("compare", before, after, "--only", "itl_ms", "--quiet")
    assert [line.split()[0] for line in quiet.stdout.splitlines()] == ["B:", "WORSE"]
    turned = kvbench("compare", after, before, "--only", "itl_ms", "-k", "int8_sym")
    assert "1 better" in turned.output
    assert turned.exit_code == 0, turned.output


def test_neither_torch_nor_the_plots_are_loaded(before, after):
    modules = ("torch", "matplotlib", "pandas", "transformers")
    code = (
        "import sys\nfrom kvbench.cli.main import app\n"
        f"try: app(['compare', {str(before)!r}, {str(after)!r}])\nexcept SystemExit: pass\n"
        f"print([m for m in {modules} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "WORSE" in done.stdout


def test_json_is_strict_and_what_is_bitwise_equal_is_counted_and_not_listed(before, after, tmp_path):
    result = kvbench("compare", before, after, "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["exit_code"] == result.exit_code == 1
    assert set(found) == {"runs", "faults", "named", "findings", "outcomes", "margins", "word", "exit_code"}
    one = next(f for f in found["findings"] if f["metric"] == "itl_ms" and f["cell"] == "cand")
    change = one["change"]
    assert (one["outcome"], change["beside"]["kind"]) == ("worse", "time")
    assert change["low"] < change["value"] < change["high"]
    assert one["values"]["A"] < one["values"]["B"]
    runs = [on_disk(stored(perplexity([210.0] * 4), name), tmp_path / name) for name in "AB"]
    result = kvbench("compare", *runs)
    assert result.exit_code == 0, result.output
    assert "4 values are bitwise equal." in result.output
    assert "kld_mean" not in result.output


def test_options_and_no_file_of_unlike_runs_or_a_fault(before, after, tmp_path, monkeypatch):
    for words, code, text in (
        (["--only", "itl"], 2, "Did you mean itl_ms?"),
        (["--margin-pct", "-1"], 2, "from 0 to 100"),
        (["--margin-pct", "nan"], 2, "from 0 to 100"),
        (["-k", "nothing_like_it"], 2, "selects no cell"),
        (["--html", "/nowhere/at/all.html"], 2, "cannot be written"),
        (["--margin-pct", "50"], 0, "nothing is worse".upper()),
        (["--only", "kv_bytes_total"], 2, "no task in common"),
    ):
        result = kvbench("compare", before, after, *words)
        assert result.exit_code == code, result.output
        assert text in result.output
    for words in (["compare", before], ["compare", before, "none"], ["history", before], ["history", "none"]):
        assert kvbench(*words).exit_code == 2
    page, notes = tmp_path / "c.html", tmp_path / "c.md"
    notes.write_text("old")
    other = stored(latency(repeats=40), "B")
    for task in other.run.tasks:
        task.options["new_tokens"] = 9
    result = kvbench("compare", before, on_disk(other, tmp_path / "other"), "--html", page)
    assert (result.exit_code, page.exists()) == (2, False)
    assert "latency: option new_tokens is 7 in A and 9 in B." in result.output
    monkeypatch.setattr("kvbench.report.compare.two_runs.as_html", Mock(side_effect=ValueError("no page")))
    assert kvbench("compare", before, after, "--html", page, "--markdown", notes).exit_code == 2
    assert (notes.read_text(), page.exists()) == ("old", False)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name):
    runs = [stored(perplexity([210.0 + i] * 4), run) for i, run in enumerate("AB")]
    for run in runs:
        object.__setattr__(run.run.manifest, "name", name)
        for task in run.run.tasks:
            object.__setattr__(task, "variant", name)
        for has_spec in (*run.run.manifest.cells, *run.run.records):
            has_spec.spec["model"] = name
    for made, found in ((comparison, compare(runs)), (timeline, history(runs))):
        page, notes = made.as_html(found), made.as_markdown(found)
        alone(page)
        assert "{{" not in name or "{{ 7*7 }}" in page
        assert not re.search(r"(?<!\\)[<`]", notes)
        assert "\x1b" not in page + notes
        rows = [line for line in notes.splitlines() if line.startswith("| ")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {5, 6, 12}


def test_history_on_the_command_line(before, after, tmp_path):
    page, notes = tmp_path / "h.html", tmp_path / "h.md"
    result = kvbench("history", tmp_path, "--only", "itl_ratio", "--html", page, "--markdown", notes)
    html, markdown = (path.read_text(encoding="utf-8") for path in (page, notes))
    assert result.exit_code == 0, result.output
    for words in (f"run 1: {before}", f"run 2: {after}", "\n2 runs, 1 line; "):
        assert words in result.output
    for text in (result.output, alone(html).text, markdown):
        assert "▼ worse" in text
    assert "itl_ms is" in alone(html).text
    assert html.count("<svg") == 1
    found = json.loads(kvbench("history", after, before, "--json").stdout)
    assert [run["path"] for run in found["runs"]] == [str(before), str(after)]
    assert [c["outcome"] for c in found["changes"] if c["cell"] == "cand"] == ["worse"]


def test_plots_are_the_same_bytes_and_break_where_runs_are_unlike():
    runs = [stored(latency(1.05, seed=i), f"run {i}") for i in range(3)]
    apart = [*runs[:2], stored(latency(1.05, seed=2), "run 2", {"cpu": "Other"})]
    (whole,), (again,), (broken,) = (plots(history(r, only=["itl_ratio"])) for r in (runs, runs, apart))
    assert whole.svg == again.svg != broken.svg
    result = history(runs[:2], only=["itl_ratio"])
    point = replace(result.lines[0].points[-1], broken=("another machine",))
    one = replace(result, lines=(replace(result.lines[0], points=(point,)),))
    assert re.match(r"2 runs, 1 line; .*; 1 break\b", timeline.headline(one))
    lines = tuple(replace(result.lines[0], place=f"place {i}") for i in range(30))  # in several plots
    assert [len(plot.legend) for plot in plots(replace(result, lines=lines))] == [12, 12, 6]


@pytest.mark.browser
@pytest.mark.parametrize("scripts", [True, False])
def test_pages_in_a_browser(before, after, tmp_path, scripts, chromium):
    """Nothing is fetched, no script is needed, and axe finds nothing."""
    from axe_playwright_python.sync_playwright import Axe

    pages = [tmp_path / "c.html", tmp_path / "h.html"]
    kvbench("compare", before, after, "--html", pages[0])
    kvbench("history", before, after, "--html", pages[1])
    context = chromium.new_context(java_script_enabled=scripts, bypass_csp=scripts)
    asked = []
    for path in pages:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert page.locator("h1").count() == 1
        assert page.get_by_text("% slower [").first.is_visible()
        if scripts:
            assert Axe().run(page).response["violations"] == []
    assert asked == [path.as_uri() for path in pages]
    context.close()
