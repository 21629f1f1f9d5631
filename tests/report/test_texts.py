"""The console: plain off a terminal, colours only where they are allowed, the verdict last."""

import io
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from kvbench.render.numbers import one_line
from kvbench.report.console import show
from kvbench.report.markdown import MOST, escaped, report, sections, table
from kvbench.report.view import build
from tests.factories.runs.reported import outcome
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


def test_one_model_is_named_once_and_a_narrow_terminal_cuts_no_word(maker, printed, monkeypatch):
    made = maker(fixed={"weights": "fp8_block128", "model": "/x/fp8", "native_model": "/x/whole"})
    for cell in made.manifest.cells[:4]:
        cell.spec.update({"weights": "native", "model": "/x/whole", "native_model": None})
    lines = printed(made).splitlines()
    assert lines[1] == "Model: /x/fp8, native weights from /x/whole"
    assert not any("/x/" in line for line in lines[2:])
    made.manifest.cells[0].spec["model"] = "/x/other"
    assert "Model:" not in printed(made)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(maker(formats=["native", "int8_static"]), Terminal()))
    table = text[text.index("Precision of") : text.index("Storage\n")]
    assert "…" not in table
    assert max(map(len, table.splitlines())) == 80


def test_quiet_prints_only_the_verdict_and_the_paths_and_a_closed_pipe_is_no_failed_check(passing):
    view = build(passing.judged)
    quiet, full = io.StringIO(), io.StringIO()
    show(view, quiet, [Path("a.html")], quiet=True)
    show(view, full, [Path("a.html")])
    assert quiet.getvalue() == "PASS  All 14 checks passed. Exit code 0.\na.html\n"
    assert full.getvalue().endswith(f"\n{quiet.getvalue()}")

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            raise OSError

    with pytest.raises(BrokenPipeError):
        show(build(passing.judged), Gone())


# Markdown: tables stay tables whatever the names are, by a real parser of GitHub's dialect.


PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def text_of(made):
    return report(build(made.judged), made.judged)


def tokens_of(text):
    return [inner for token in PARSER.parse(text) for inner in (token, *(token.children or ()))]


def shown(text):
    """What a reader sees of an inline text."""
    return seen(PARSER.parseInline(text)[0])


def seen(inline):
    return "".join(t.content for t in inline.children or () if t.type in ("text", "text_special"))


def tables(text):
    """heading -> rows of cells, as a reader sees them."""
    found, heading, rows = {}, "", None
    tokens = PARSER.parse(text)
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = seen(tokens[i + 1])
        elif token.type == "table_open":
            rows = found.setdefault(heading, [])
        elif token.type == "tr_open":
            rows.append([])
        elif token.type in ("td_open", "th_open"):
            rows[-1].append(seen(tokens[i + 1]))
    return found


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_shown_as_they_are_and_make_no_markup(text, maker, harmless):
    """Alone, and in a table's cell."""
    want = one_line(text)
    assert shown(escaped(text)) == want
    kinds = {token.type for token in tokens_of(f"x {escaped(text)} x")}
    assert kinds <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    (rows,) = tables(f"# h\n\n{table(('a', 'b'), [[escaped(text), 'end']])}").values()
    assert [cell.strip() for cell in rows[1]] == [want.strip(), "end"]
    made = text_of(all_statuses(maker, text))
    found = {token.type for token in tokens_of(made)}
    assert found <= harmless | {"text_special"}
    assert "html_inline" not in found
    assert not any(ord(c) < 32 and c != "\n" for c in made)
    for rows in tables(made).values():
        assert len({len(row) for row in rows}) == 1


def test_names_with_underscores_stay_readable_and_more_checks_than_fit_are_counted(failing, passing):
    assert escaped("kv_format=int8_sym") == "kv_format=int8_sym"
    assert escaped("_x_ a_ _b") == "\\_x\\_ a\\_ \\_b"
    assert escaped("n" * 500, 120) == one_line("n" * 500, 120)
    made = failing.with_outcomes(*[outcome("x", "fail")] * MOST)
    assert len(tables(text_of(made))["Worst checks"]) == 1 + MOST
    assert "\n\nand 4 more below.\n" in text_of(made)
    titles = list(sections(build(passing.judged), passing.judged))
    assert not {"Worst checks", "Failures"} & set(titles)
    assert titles[-2:] == ["All checks", "How to reproduce"]


@pytest.fixture(scope="module")
def harmless(maker):
    return {token.type for token in tokens_of(text_of(all_statuses(maker, "harmless")))}
