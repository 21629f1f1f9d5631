"""The console: plain off a terminal, colours only where they are allowed, the verdict last."""

import io
import re
from pathlib import Path

import pytest

from kvbench.report.console import show
from kvbench.report.view import build
from tests.report.hostile import HOSTILE, all_statuses

KV_TABLE = "Precision of the KV cache"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def printed(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def go(made, file=None, paths=()):
        file = file or io.StringIO()
        show(build(made.judged), file, paths)
        return file.getvalue()

    return go


def test_colours_are_only_where_they_are_allowed(passing, printed, monkeypatch):
    assert re.search(r"\x1b\[1;32mPASS", printed(passing, Terminal()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = printed(passing)
    assert set(text) - set("·×\n") <= set(map(chr, range(32, 127)))
    assert "0.515625" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", printed(passing, Terminal()))


@pytest.mark.parametrize("text", [*HOSTILE, "[red]x[/red]", "[/]", ":smile:"])
def test_names_are_printed_and_never_interpreted(maker, printed, text):
    found = printed(all_statuses(maker, text))
    assert not any(ord(c) < 32 and c != "\n" for c in found)
    if text.isprintable() and len(text) < 30:
        assert text in found


def test_one_model_is_named_once_above_all_tables(maker, printed):
    made = maker(fixed={"weights": "fp8_block128", "model": "/x/fp8", "native_model": "/x/whole"})
    for cell in made.manifest.cells[:4]:
        cell.spec.update({"weights": "native", "model": "/x/whole", "native_model": None})
    lines = printed(made).splitlines()
    assert lines[1] == "Model: /x/fp8, native weights from /x/whole"
    assert not any("/x/" in line for line in lines[2:])
    made.manifest.cells[0].spec["model"] = "/x/other"
    assert "Model:" not in printed(made)


def test_a_narrow_terminal_cuts_no_word_of_the_precision_table(maker, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(maker(formats=["native", "int8_static"]), Terminal()))
    table = text[text.index("Precision of") : text.index("Storage\n")]
    assert "…" not in table
    assert max(map(len, table.splitlines())) == 80


def test_quiet_prints_only_the_verdict_and_the_paths(passing):
    view = build(passing.judged)
    quiet, full = io.StringIO(), io.StringIO()
    show(view, quiet, [Path("a.html")], quiet=True)
    show(view, full, [Path("a.html")])
    assert quiet.getvalue() == "PASS  All 14 checks passed. Exit code 0.\na.html\n"
    assert full.getvalue().endswith(f"\n{quiet.getvalue()}")


def test_a_closed_pipe_is_no_failed_check(passing):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            raise OSError

    with pytest.raises(BrokenPipeError):
        show(build(passing.judged), Gone())
