"""The page stays under its size: what is left out is said on it, and a check that did not pass is never left out."""

from dataclasses import replace

import pytest

from kvbench.report.budget import LIMIT, STEPS, shorter
from kvbench.report.html import render
from kvbench.report.view import build

FORMATS = ("native", "int8_sym", "int8_static", "fp8_e4m3", "fp8_e4m3_static")


def test_a_matrix_of_hundreds_of_cells_stays_under_the_limit_and_says_what_is_left_out(maker):
    made = maker(
        formats=FORMATS, batches=(1, 2, 4, 8, 16, 32, 64), contexts=tuple(128 * 2**i for i in range(8))
    )
    html = render(build(made.judged))
    assert len(html.encode()) <= LIMIT == 2_000_000
    assert (
        "<strong>Shortened page.</strong> To stay under 2 MB, columns that only explain others are left out"
        in html
    )


def test_a_small_run_is_shown_whole(passing):
    assert "Shortened page" not in render(build(passing.judged))


@pytest.fixture
def short(maker, failed):
    made = failed(maker(batches=(1, 2, 4, 8), contexts=tuple(range(128, 128 * 9, 128))))
    view = build(made.judged)
    for step in STEPS:
        view = shorter(view, step)
    return view


def test_each_step_is_said_in_one_notice_before_all_others(short):
    first, *others = short.notices
    assert first.title == "Shortened page"
    assert all(said in first.sentence for said, _ in STEPS)
    assert "Shortened page" not in [notice.title for notice in others]


def test_a_line_and_a_column_in_which_a_check_did_not_pass_are_kept(maker, outcome):
    made = maker(batches=(1, 2, 4, 8), contexts=tuple(range(128, 128 * 9, 128)))
    last = made.manifest.cells[-1].id
    bad = outcome("itl_p90_ms at most 1", "itl_p90_ms", last, "", "fail", 99.0, "at most 1", "too slow")
    view = build(made.with_verdict(bad, exit_code=1, word="fail").judged)
    for step in STEPS:
        view = shorter(view, step)
    (latency,) = (table for table in view.tables if table.key == "latency")
    assert len(latency.lines) == 40
    assert last in [line.label.cells[0] for line in latency.lines]
    metrics = [column.metric for column in latency.columns]
    assert "itl_p90_ms" in metrics
    assert "itl_p50_ms" not in metrics
    assert all(len(line.entries) == len(metrics) for line in latency.lines)


def test_the_shortened_page_still_lays_out(short):
    assert "Tables show 40 lines" in render(replace(short, heats=()))
