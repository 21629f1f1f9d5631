"""The page: well-formed, self-contained, escaped, readable without sight, colour or scripts, not too big."""

import base64
import hashlib
import itertools
import re
from dataclasses import replace

import pytest

from kvbench.report.html import LIMIT, STEPS, TITLE, render, shorter
from kvbench.report.view import build
from tests.factories.runs.reported import fail, make, outcome
from tests.report.hostile import HOSTILE, hostile
from tests.report.parsed import Page, alone


def html_of(made):
    return render(build(made.judged))


@pytest.fixture(scope="module")
def passing_html():
    return html_of(make())


@pytest.fixture(scope="module")
def failing_html():
    return html_of(fail(make()))


def test_the_page_is_reproducible_and_loads_and_runs_nothing(passing_html, failing_html, passing):
    page = alone(failing_html)
    assert len(failing_html.encode()) < 2_000_000
    assert page.all("script") == [{}]  # ours alone, and by its hash the only one that may run
    body = failing_html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in failing_html
    assert "default-src 'none'" in failing_html
    assert not {word for word in ("eval", "innerHTML") if word in body}
    assert alone(passing_html).all("script") == [{}]
    assert html_of(passing) == passing_html
    html = render(build(passing.judged, definitions={"ppl": "exp of the mean", "unused_ms": "never"}))
    assert "<dt><code>ppl</code></dt><dd>exp of the mean</dd>" in html
    assert "unused_ms" not in html

    def change(row):  # a line without any measurement gives its reason once
        own = row.cell == "int8_sym-4-512" and row.unit.name in ("ms", "tok/s")
        missing = {"value": None, "low": None, "high": None, "n": None, "note": "not run"}
        return replace(row, **missing) if own or row.metric in ("itl_ratio", "ttft_ratio") else row

    assert html_of(passing.with_rows(change)).count("not measured: not run") == 1


@pytest.fixture(scope="module")
def harmless_tags():
    return {tag for tag, _ in Page(html_of(hostile(make, "harmless"))).tags}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_shown_and_never_interpreted(harmless_tags, text):
    page = Page(html_of(hostile(make, text)))
    assert page.faults == []
    # The same elements whatever the names are: nothing in them became markup.
    assert {tag for tag, _ in page.tags} == harmless_tags
    assert len(page.all("style")) == 1
    assert not any(c == "\u202e" or (ord(c) < 32 and c != "\n") for c in page.text)
    assert not text.isprintable() or len(text) > 60 or page.text.count(text) > 10  # as it is written


def test_the_page_can_be_used_by_keyboard_and_by_ear(failing_html):
    page = Page(failing_html)
    names = [tag for tag, _ in page.tags]
    captions = [i for i, tag in enumerate(names) if tag == "caption"]
    assert [i + 1 for i, tag in enumerate(names) if tag == "table"] == captions
    assert all(attrs.get("scope") in ("col", "row", "colgroup", "rowgroup") for attrs in page.all("th"))
    levels = [int(tag[1]) for tag in names if re.fullmatch("h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))  # no level is skipped
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [attrs["href"][1:] for attrs in page.all("a")]
    targets += [attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs]
    assert set(targets) <= set(ids)
    for _, attrs in page.tags:  # what scrolls can be focused, and has a name
        if attrs.get("class") in ("scroll", "plot"):
            assert attrs["tabindex"] == "0"
            assert attrs.get("aria-labelledby") or attrs.get("aria-label")
    assert {attrs["role"] for attrs in page.all("svg")} == {"img"}
    assert page.all("html")[0]["lang"] == "en"


def test_sections_in_the_order_of_a_readers_questions_and_numbers_with_all_that_belongs_to_them(passing_html):
    ids = [attrs["id"] for attrs in Page(passing_html).all("section") if "id" in attrs]
    assert ids == [
        *("verdict", "release", "failures", "checks", "precision", "matrix", "storage", "weights", "latency"),
        *("quality", "positions", "agreement", "mcq", "parity", "cells", "environment", "reproduce"),
    ]
    for text in (
        '<data value="0.0816">+0.082</data> <span class="unit">%</span>',
        "<small>[-0.012, +0.175], n = 292,883</small>",
        '<data value="0.515625">0.515625</data>',
        "5,898,240</data> <span",
        "(5.625 MiB, 5.90 MB)",
        "<code>kvbench run matrices/int8.yaml</code>",
        "kv_format:",
    ):
        assert text in passing_html


def test_many_cells_stay_under_the_limit_and_keep_the_line_and_column_of_a_failed_check(maker, passing_html):
    formats = ("native", "int8_sym", "int8_static", "fp8_e4m3", "fp8_e4m3_static")
    contexts = tuple(128 * 2**i for i in range(8))
    html = html_of(maker(formats=formats, batches=(1, 2, 4, 8, 16, 32, 64), contexts=contexts))
    assert len(html.encode()) <= LIMIT == 2_000_000
    assert f"<strong>{TITLE}.</strong>" in html
    assert TITLE not in passing_html
    made = maker(batches=(1, 2, 4, 8), contexts=tuple(range(128, 128 * 9, 128)))
    last = made.manifest.cells[-1].id
    bad = outcome("itl_p90_ms at most 1", "fail", cells=[last], metric="itl_p90_ms", value=99.0)
    view = build(made.with_outcomes(bad).judged)
    for step in STEPS:
        view = shorter(view, step)
    (latency,) = (table for table in view.tables if table.key == "latency")
    assert len(latency.lines) == 40
    assert last in [line.label.cells[0] for line in latency.lines]
    metrics = [column.metric for column in latency.columns]
    assert ("itl_p90_ms" in metrics, "itl_p50_ms" in metrics) == (True, False)
    assert all(len(line.entries) == len(metrics) for line in latency.lines)
    notices = [notice for notice in view.notices if notice.title == TITLE]
    assert notices == [view.notices[0]]
    assert all(sentence in notices[0].found for sentence, _ in STEPS)
    assert "Tables show 40 lines" in render(view)
