"""The page stays under its size limit: it names what is left out, and keeps every check that did not pass."""

from kvbench.report.html import LIMIT, STEPS, TITLE, render, shorter
from kvbench.report.view import build
from tests.factories.runs.reported import outcome

FORMATS = ("native", "int8_sym", "int8_static", "fp8_e4m3", "fp8_e4m3_static")
MANY = {"batches": (1, 2, 4, 8), "contexts": tuple(range(128, 128 * 9, 128))}


def test_a_matrix_of_hundreds_of_cells_stays_under_the_limit_and_a_small_one_is_shown_whole(maker, passing):
    contexts = tuple(128 * 2**i for i in range(8))
    html = render(build(maker(formats=FORMATS, batches=(1, 2, 4, 8, 16, 32, 64), contexts=contexts).judged))
    assert len(html.encode()) <= LIMIT == 2_000_000
    assert f"<strong>{TITLE}.</strong>" in html
    assert TITLE not in render(build(passing.judged))


def test_all_steps_keep_the_line_and_the_column_of_a_failed_check(maker):
    made = maker(**MANY)
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
