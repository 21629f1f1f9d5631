"""Markdown: tables stay tables whatever the names are, by a real parser of GitHub's dialect."""

import pytest
from markdown_it import MarkdownIt

from kvbench.render.numbers import one_line
from kvbench.report.markdown import MOST, escaped, report, sections, table
from kvbench.report.view import build
from tests.factories.runs.reported import outcome
from tests.report.hostile import HOSTILE, all_statuses

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
def test_an_escaped_text_is_shown_as_it_is(text):
    """Alone, and in a table's cell."""
    want = one_line(text)
    assert shown(escaped(text)) == want
    kinds = {token.type for token in tokens_of(f"x {escaped(text)} x")}
    assert kinds <= {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    (rows,) = tables(f"# h\n\n{table(('a', 'b'), [[escaped(text), 'end']])}").values()
    assert [cell.strip() for cell in rows[1]] == [want.strip(), "end"]


def test_names_with_underscores_stay_readable():
    assert escaped("kv_format=int8_sym") == "kv_format=int8_sym"
    assert escaped("_x_ a_ _b") == "\\_x\\_ a\\_ \\_b"
    assert escaped("n" * 500, 120) == one_line("n" * 500, 120)


@pytest.fixture(scope="module")
def harmless(maker):
    return {token.type for token in tokens_of(text_of(all_statuses(maker, "harmless")))}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_make_no_markup(maker, harmless, text):
    made = text_of(all_statuses(maker, text))
    found = {token.type for token in tokens_of(made)}
    assert found <= harmless | {"text_special"}
    assert "html_inline" not in found
    assert not any(ord(c) < 32 and c != "\n" for c in made)
    for rows in tables(made).values():
        assert len({len(row) for row in rows}) == 1


def test_more_checks_than_there_is_room_for_are_counted_and_without_any_there_is_no_section(failing, passing):
    made = failing.with_outcomes(*[outcome("x", "fail")] * MOST)
    assert len(tables(text_of(made))["Worst checks"]) == 1 + MOST
    assert "\n\nand 4 more below.\n" in text_of(made)
    titles = list(sections(build(passing.judged), passing.judged))
    assert not {"Worst checks", "Failures"} & set(titles)
    assert titles[-2:] == ["All checks", "How to reproduce"]
