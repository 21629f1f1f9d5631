"""The console: plain off a terminal, colours only where they may be, the verdict last."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.metrics.collect import TABLES
from kvbench.report.console import show
from kvbench.report.view import build


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def printed(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def go(made, file, paths=()):
        show(build(made.judged), file, paths)
        return file.getvalue()

    return go


def rows_of(text, title):
    """The body of a table off a terminal, a list of cells a row."""
    lines = text.splitlines()
    lines = lines[lines.index(title) :]
    lines = lines[: lines.index("")] if "" in lines else lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][
        1:
    ]


def test_off_a_terminal_it_is_plain_text(passing, printed):
    text = printed(passing, io.StringIO())
    assert "\x1b" not in text
    assert text.isprintable() or set(text) - set("·×\n") <= set(map(chr, range(32, 127)))
    assert "kv_ratio_16bit" in text
    assert "0.515625" in text


def test_force_color_does_not_reach_a_file(passing, printed, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in printed(passing, io.StringIO())


def test_on_a_terminal_the_verdict_is_coloured(passing, printed):
    assert re.search(r"\x1b\[1;32mPASS", printed(passing, Terminal()))


def test_no_color_is_respected_on_a_terminal(passing, printed, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", printed(passing, Terminal()))


def test_the_verdict_and_the_paths_come_last(failing, printed):
    lines = printed(failing, io.StringIO(), [Path("runs/int8/report.html")]).splitlines()
    assert lines[-1] == "runs/int8/report.html"
    assert lines[-2].startswith("FAIL  16 checks: 2 failed, 2 not evaluated, 12 passed;")


def test_a_failing_run_names_what_was_lost_and_where(failing, printed):
    text = printed(failing, io.StringIO())
    assert "mismatch: Precision lost" in text
    assert (
        "int8_sym · batch 4 · context 512: E1: Layer 7 of 30 stores float32 where int8 was resolved" in text
    )
    assert "+2.410 % [+2.020, +2.810] FAIL" in text


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "a\x1b[31mb", "x" * 500, "量化", ":smile:"])
def test_names_are_printed_and_never_obeyed(maker, printed, name):
    made = maker(fixed={"model": name, "trust_remote_code": True})
    made = made.with_cells(lambda cell: replace(cell, varied=("kv_format", "model")))
    text = printed(made, io.StringIO())
    assert "\x1b" not in text
    assert name.replace("\x1b", "\\x1b")[:30] in text


def test_one_model_is_said_once_above_all_tables(maker, printed):
    made = maker(fixed={"weights": "fp8_block128", "model": "/x/fp8", "native_model": "/x/whole"})
    for cell in made.manifest.cells[:4]:
        cell.spec.update({"weights": "native", "model": "/x/whole", "native_model": None})
    lines = printed(made, io.StringIO()).splitlines()
    assert lines[1] == "Model: /x/fp8, native weights from /x/whole"
    assert not any("/x/" in line for line in lines[2:])
    made.manifest.cells[0].spec["model"] = "/x/other"
    assert "Model:" not in printed(made, io.StringIO())


def test_partial_lines_are_marked(passing, printed):
    made = passing.with_rows(lambda r: replace(r, partial="limited") if r.metric == "ppl" else r)
    assert "int8_sym wikitext2 stream512 (partial)" in printed(made, io.StringIO())


def test_the_backend_is_what_was_resolved_and_why_where_it_is_not_what_was_asked_for(maker, printed):
    chosen = {
        "requested": "auto",
        "resolved": "torch",
        "reason": "no_gpu",
        "rejected": [["triton", "no_gpu"]],
    }
    made = maker(fixed={"backend": "auto"}).with_records(
        lambda r: (
            replace(r, decision={**r.decision, "backend": chosen}) if r.spec["kv_format"] == "int8_sym" else r
        )
    )
    native, quantized = rows_of(printed(made, io.StringIO()), "Precision of the KV cache")
    assert [native[0], native[-1]] == ["native (4 cells)", "torch"]
    assert [quantized[0], quantized[-1]] == ["int8_sym (4 cells)", "torch (no_gpu)"]


def test_a_narrow_terminal_cuts_no_word_of_the_precision_table(maker, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(maker(formats=["native", "int8_static"]), Terminal()))
    table = text[text.index("Precision of") : text.index("Storage\n")]
    assert "…" not in table
    assert max(map(len, table.splitlines())) == 80


def test_a_cell_without_a_decision_has_no_backend(passing, printed):
    made = passing.with_records(lambda r: replace(r, decision=None))
    assert {row[-1] for row in rows_of(printed(made, io.StringIO()), "Precision of the KV cache")} == {
        "not resolved"
    }


@pytest.mark.parametrize(
    ("value", "text"), [(2048, "none in 2,048"), (2047, "2,047 step"), (0, "0 step"), (None, "not measured")]
)
def test_a_divergence_that_was_not_seen_is_no_step(passing, printed, value, text):
    made = passing.with_rows(lambda r: replace(r, value=value) if r.metric == "first_divergence" else r)
    _, candidate = rows_of(printed(made, io.StringIO()), "Token agreement")
    assert text in candidate


def test_what_ratios_are_paired_with_is_said_under_their_table_alone(passing, printed):
    (note,) = {table.footnote for table in TABLES if table.key == "latency"}
    lines = printed(passing, io.StringIO()).splitlines()
    at = lines.index("Latency")
    assert lines[lines.index("", at) - 1] == note
    assert lines.count(note) == 1


def test_a_table_without_a_ratio_needs_no_word_on_ratios(maker, printed):
    assert "Ratios" not in printed(maker(formats=["native"]), io.StringIO())


def test_a_reader_that_has_gone_is_no_failed_check(passing):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            raise OSError

    with pytest.raises(BrokenPipeError):
        show(build(passing.judged), Gone())
