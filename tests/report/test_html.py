"""The page: well-formed, self-contained, escaped, readable without sight, colour or scripts."""

import base64
import hashlib
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvbench.report.html import render
from kvbench.report.view import build
from tests.report.hostile import HOSTILE, hostile

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """The page as a tree of what the tests ask: tags, attributes and text; unclosed or stray tags are faults."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.faults, self.tags, self.text = [], [], [], []
        self.feed(html)
        self.close()
        self.faults += [f"unclosed {tag}" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"stray </{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attrs for name, attrs, _ in self.tags if name == tag]


@pytest.fixture(scope="module")
def html_of():
    return lambda made: render(build(made.judged))


@pytest.fixture(scope="module")
def passing_html(maker, html_of):
    return html_of(maker())


@pytest.fixture(scope="module")
def failing_html(maker, failed, html_of):
    return html_of(failed(maker()))


@pytest.fixture(scope="module")
def harmless_tags(maker, html_of):
    return {tag for tag, _, _ in Page(html_of(hostile(maker, "harmless"))).tags}


@pytest.mark.parametrize("kind", ["passing_html", "failing_html"])
def test_the_page_is_well_formed_and_under_two_megabytes(kind, request):
    html = request.getfixturevalue(kind)
    assert Page(html).faults == []
    assert len(html.encode()) < 2_000_000


def test_the_page_loads_nothing_and_runs_nothing(failing_html):
    page = Page(failing_html)
    assert page.all("link") + page.all("img") + page.all("iframe") == []
    (script,) = page.all("script")  # ours alone, and by its hash the only one that may run
    assert script == {}
    body = failing_html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in failing_html
    assert "eval" not in body
    assert "innerHTML" not in body
    for _, attrs, _ in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert attrs.get(name, "#").startswith("#"), (name, attrs[name])
    assert "@import" not in failing_html
    assert re.findall(r"url\((?!#)", failing_html) == []
    assert "default-src 'none'" in failing_html


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_shown_and_never_interpreted(maker, html_of, harmless_tags, text):
    page = Page(html_of(hostile(maker, text)))
    assert page.faults == []
    # The same elements whatever the names are: nothing in them became markup.
    assert {tag for tag, _, _ in page.tags} == harmless_tags
    assert len(page.all("style")) == 1
    shown = "".join(page.text)
    assert not any(ord(c) < 32 and c not in "\n" for c in shown)
    assert "\u202e" not in shown
    assert not text.isprintable() or len(text) > 60 or shown.count(text) > 10  # as it is written


def test_every_table_has_a_caption_and_every_header_cell_a_scope(failing_html):
    page = Page(failing_html)
    captions = [i for i, (tag, _, _) in enumerate(page.tags) if tag == "caption"]
    tables = [i for i, (tag, _, _) in enumerate(page.tags) if tag == "table"]
    assert [i + 1 for i in tables] == captions
    assert all(attrs.get("scope") in ("col", "row", "colgroup", "rowgroup") for attrs in page.all("th"))


def test_headings_are_one_h1_and_no_level_is_skipped(failing_html):
    levels = [int(tag[1]) for tag, _, _ in Page(failing_html).tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_the_page_can_be_used_by_keyboard_and_by_ear(failing_html):
    page = Page(failing_html)
    ids = [attrs["id"] for _, attrs, _ in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [attrs["href"][1:] for attrs in page.all("a")]
    targets += [attrs[a] for _, attrs, _ in page.tags for a in ("aria-labelledby",) if a in attrs]
    assert set(targets) <= set(ids)
    for _, attrs, _ in page.tags:  # what scrolls can be focused, and has a name
        if attrs.get("class") in ("scroll", "plot"):
            assert attrs["tabindex"] == "0"
            assert attrs.get("aria-labelledby") or attrs.get("aria-label")
    assert {attrs["role"] for attrs in page.all("svg")} == {"img"}
    assert page.all("html")[0]["lang"] == "en"


def test_the_sections_come_in_the_order_of_a_readers_questions(passing_html):
    ids = [a["id"] for tag, a, _ in Page(passing_html).tags if tag == "section" and "id" in a]
    assert ids == ["verdict", "release", "failures", "checks", "precision", "matrix", "storage", "weights", "latency", "quality", "positions",
                   "agreement", "mcq", "parity", "cells", "environment", "reproduce"]  # fmt: skip


def test_numbers_come_with_unit_interval_count_and_full_precision(passing_html):
    assert '<data value="0.0816">+0.082</data> <span class="unit">%</span>' in passing_html
    assert "<small>[-0.012, +0.175], n = 292,883</small>" in passing_html
    assert '<data value="0.515625">0.515625</data>' in passing_html
    assert "5,898,240</data> <span" in passing_html
    assert "(5.625 MiB, 5.90 MB)" in passing_html


def test_a_line_without_any_measurement_gives_its_reason_once(maker, html_of):
    def change(row):
        own = row.cell == "int8_sym-4-512" and row.unit.name in ("ms", "tok/s")
        missing = {"value": None, "low": None, "high": None, "n": None, "note": "not run"}
        return replace(row, **missing) if own or row.metric in ("itl_ratio", "ttft_ratio") else row

    assert html_of(maker().with_rows(change)).count("not measured: not run") == 1


def test_the_page_is_reproducible_and_has_the_command_the_matrix_and_definitions(
    passing, passing_html, html_of
):
    assert html_of(passing) == passing_html
    assert "<code>kvbench run matrices/int8.yaml</code>" in passing_html
    assert "kv_format:" in passing_html
    html = render(build(passing.judged, definitions={"ppl": "exp of the mean", "unused_ms": "never"}))
    assert "<dt><code>ppl</code></dt><dd>exp of the mean</dd>" in html
    assert "unused_ms" not in html
