"""Figures and drill-downs of quality out of made-up records: exact numbers, worst first, old records too."""

import math

import pytest

from kvbench.report.figures import numbers
from kvbench.report.html import render
from kvbench.report.view import build
from kvbench.stats.intervals import clustered_mean, clustered_ratio
from tests.factories.runs.drawn import (
    CLOSE,
    FACTS,
    FIRST,
    NATIVE,
    SECOND,
    STEPS,
    agreement,
    figure,
    measured,
    perplexed,
    quality,
    question,
    small,
    text_of,
    texts,
)

# KLD


def test_kld_percentiles_are_the_rows_own(maker):
    view = build(perplexed(maker).judged)
    assert [line.variant for line in view.plots.kld] == ["wikitext2", "pydoc"]
    rows = view.plots.kld[0].rows
    assert list(rows) == ["kld_p50", "kld_p90", "kld_p99", "kld_p999", "kld_max"]
    assert [rows[m].value for m in rows] == [0.1, 0.9, 0.9, 0.9, 0.9]
    found = figure(view, "quality")
    assert "percentile of 0" not in found.caption
    assert [name for _, _, name in found.legend] == ["p50", "p90", "p99", "p99.9", "max"]


def test_a_percentile_of_0_is_in_the_table_and_said_to_be_off_the_axis(maker):
    zero = [[0.0] * 3] * 3
    own = [text_of(3.0, kld, d) for d, kld in enumerate(zero)]
    view = build(perplexed(maker, own=own, tokens=zero).judged)
    found = figure(view, "quality")
    assert "A percentile of 0 has no place" in found.caption
    assert texts(found.grids[0].rows[0])[1].startswith("0 nat")


def test_chunks_stand_worst_first_with_their_own_numbers(maker):
    chunks = build(perplexed(maker).judged).plots.chunks[0]
    assert [(c.index, c.document, c.tokens) for c in chunks.lines] == [(1, "1", 3), (0, "0", 3), (2, "2", 3)]
    assert [round(c.kld, 12) for c in chunks.lines] == [0.3, 0.2, round(0.4 / 3, 12)]
    assert [round(c.delta, 12) for c in chunks.lines] == [round(1 / 3, 12), 0, round(2 / 3, 12)]
    assert (chunks.total, chunks.documents) == (3, 3)
    assert numbers.chunks(chunks).summary == "By chunk, all 3: int8_sym · wikitext2"


def test_positions_hold_the_tokens_of_their_bucket(maker):
    first, second = build(perplexed(maker).judged).plots.chunks[0].positions
    assert (first.low, first.high, first.tokens, second.low, second.high, second.tokens) == (0, 1, 6, 2, 3, 3)
    assert first.kld == clustered_mean([0.1 + 0.2, 0.0, 0.4], [2, 2, 2], range(3))
    assert (first.most, second.most) == (0.4, 0.9)
    assert second.kld.value == pytest.approx(0.4)
    assert first.delta == clustered_ratio([0.0, 0.5, 1.0], [2, 2, 2], range(3))


def test_a_sample_of_the_tokens_has_no_kld_by_position(maker):
    positions = build(perplexed(maker, kept=[0.1, 0.9]).judged).plots.chunks[0].positions
    assert [p.kld for p in positions] == [None, None]
    grid = numbers.positions(build(perplexed(maker, kept=[0.1, 0.9]).judged).plots.chunks[0])
    assert grid.columns == ("Position", "NLL delta")
    assert "does not hold the KLD of every token" in grid.note


def test_old_records_without_positions_or_divergence_still_list_their_chunks(maker):
    bare = [{"tokens": 3, "nll": 3.0 + d, "document": d} for d in range(3)]
    native = [c | {"nll": 3.0} for c in bare]
    made = measured(
        small(maker),
        perplexity__native=({"chunks": native}, {"scored": 9}),
        perplexity__int8_sym=({"chunks": bare}, {"scored": 9}),
    )
    chunks = build(made.judged).plots.chunks[0]
    assert [c.index for c in chunks.lines] == [2, 1, 0]
    assert chunks.positions == ()
    assert build(made.judged).plots.kld == ()
    assert "Worst NLL delta first" in numbers.chunks(chunks).note


def test_records_of_other_data_or_other_chunks_are_not_set_side_by_side(maker):
    other = measured(small(maker), perplexity__native=({"chunks": NATIVE}, {**FACTS, "data_sha": "z"}), perplexity__int8_sym=quality())  # fmt: skip
    assert build(other.judged).plots.chunks == ()
    moved = [c | {"document": 7} for c in NATIVE]
    made = measured(
        small(maker), perplexity__native=({"chunks": moved}, FACTS), perplexity__int8_sym=quality()
    )
    assert build(made.judged).plots.chunks == ()


# Agreement


def lines_of(maker, **kinds):
    return build(measured(small(maker), **agreement(**kinds)).judged).plots.agreement


def test_the_curve_is_the_share_so_far(maker):
    own, again = lines_of(maker, differ=(3, 100), flips=(50,))
    curve = dict(own.points)
    assert [curve[i] for i in (0, 2, 3, 4, 99, 100, 127)] == [
        1,
        1,
        3 / 4,
        4 / 5,
        99 / 100,
        99 / 101,
        126 / 128,
    ]
    assert (own.first, own.at_first, own.steps, own.again) == (3, 0.75, 128, False)
    assert (again.name, again.again, again.first) == ("native, read again (A/A)", True, None)
    assert dict(again.points)[127] == 127 / 128
    assert again.sentence == "1 of 128 steps flip where the baseline reads its own text a second time"


def test_a_long_curve_keeps_its_ends_and_few_points():
    from kvbench.report.figures.agreement import _curve

    points = _curve(range(0, 2048, 2), 2048)
    assert len(points) < 900
    assert (points[0], points[-1]) == ((0, 0.0), (2047, 0.5))
    assert all(share == 1 - math.ceil((step + 1) / 2) / (step + 1) for step, share in points)
    assert _curve([], 0) == ()


def test_a_real_divergence_a_near_tie_and_one_that_cannot_be_judged(maker):
    margins = [1.0] * STEPS
    margins[3] = 0.005
    real, _ = lines_of(maker, differ=(3, 100))
    assert (real.real, real.margin) == (True, 1.0)
    assert real.sentence.endswith(
        "first divergence at step 3, where native's top-2 margin is 1 logit: a real divergence"
    )
    tie, _ = lines_of(maker, differ=(3, 100), margins=margins)
    assert (tie.real, tie.margin) == (False, 0.005)
    assert tie.sentence.endswith(
        "near-tie within the baseline's own noise, no real divergence; the first beyond near-ties is at step 100"
    )
    alone, _ = lines_of(maker, differ=(3,), margins=margins)
    assert alone.sentence.endswith("no real divergence; none beyond near-ties follows")
    moved = [5.0] * STEPS
    made = agreement(differ=(3,))
    made["agreement__native"][0]["aa_margins"] = moved
    unknown = build(measured(small(maker), **made).judged).plots.agreement[0]
    assert unknown.real is None
    assert "whether it is real is not known: the native margin of step 0 moved by 4 logit" in unknown.sentence
    none, _ = lines_of(maker)
    assert (none.first, none.passage) == (None, None)
    assert none.sentence.startswith("agrees on 128 of 128 steps (")
    assert none.sentence.endswith(", no divergence")


def test_open_and_filled_signs_tell_a_near_tie_from_a_real_divergence(maker):
    from kvbench.report.figures.quality import agreement_svg

    margins = [0.005] * STEPS
    drawn = [
        agreement_svg(lines_of(maker, differ=(3,), margins=m), "t").count("fill-opacity: 0")
        for m in (None, margins)
    ]
    assert drawn[1] == drawn[0] + 1


def test_the_texts_at_the_divergence_are_shown_and_old_records_say_what_is_missing(maker):
    stored = {"text_before": "The cat", "native_text": " sat\non", "continuation_text": " lay"}
    made = measured(small(maker), **agreement(differ=(3,), continuation=stored))
    page = render(build(made.judged))
    assert "Text at the first divergence: int8_sym, step 3" in page
    for text in ("The cat", " sat\non", " lay"):
        assert f'<pre tabindex="0">{text}</pre>' in page
    del stored["text_before"]
    old = build(measured(small(maker), **agreement(differ=(3,), continuation=stored)).judged)
    assert old.plots.agreement[0].passage.before == "text not stored"
    bare = build(measured(small(maker), **agreement(differ=(3,))).judged).plots.agreement[0].passage
    assert (bare.before, bare.native, bare.candidate) == ("text not stored",) * 3


def test_a_long_text_is_cut_and_says_so(maker):
    own, _ = lines_of(maker, differ=(3,), continuation={"native_text": "n" * 1001})
    assert own.passage.native == "n" * 1000 + " … (1,001 characters in all)"


def test_an_old_baseline_without_a_second_run_has_no_line_of_its_own(maker):
    lines = lines_of(maker, differ=(3,), facts={"aa_disagreements": None})
    assert [line.again for line in lines] == [False]


# Questions


def asked(maker, natives, owns, noise=0.01):
    natives = [q | {"aa_scores": [s + noise for s in q["scores"]]} for q in natives]
    made = measured(
        small(maker), mcq__native=({"questions": natives}, {}), mcq__int8_sym=({"questions": owns}, {})
    )
    return build(made.judged).plots.questions


def test_changed_picks_come_first_and_right_to_wrong_before_the_others(maker):
    natives = [
        question(0, 0, FIRST),
        question(1, 2, FIRST),
        question(2, 1, FIRST),
        question(3, 0, FIRST),
        question(4, 0, CLOSE),
    ]
    natives += [question(i, 0, FIRST) for i in range(5, 9)]
    owns = [
        question(0, 0, [-1.5, -2.0, -3.0]),
        question(1, 2, SECOND),
        question(2, 1, SECOND),
        question(3, 0, SECOND),
    ]
    owns += [question(4, 0, [-1.01, -1.0, -3.0])] + [question(i, 0, FIRST) for i in range(5, 9)]
    (found,) = asked(maker, natives, owns)
    assert [q.id for q in found.lines] == ["q3", "q4", "q2", "q1", "q0", "q5", "q6", "q7", "q8"]
    assert [q.change for q in found.lines[:5]] == ["right to wrong"] * 2 + [
        "wrong to right",
        "wrong to wrong",
        "",
    ]
    assert [q.real for q in found.lines[:5]] == [True, False, True, True, None]
    assert (found.flips, found.total, found.noise) == (4, 9, pytest.approx(0.01))
    line = found.lines[0]
    assert (line.gold, line.native, line.own, line.native_margin, line.margin, line.moved) == (
        "A",
        "A",
        "B",
        1.0,
        1.0,
        1.0,
    )
    grid = numbers.questions(found)
    assert grid.summary == "Questions of int8_sym · cloze: 4 of 9 picks differ, all 9 shown"
    assert grid.rows[1][5] == "right to wrong (near-tie)"


def test_only_the_worst_are_listed_and_the_total_is_said(maker):
    many = [question(i, 0, FIRST) for i in range(60)]
    (found,) = asked(maker, many, [question(i, 0, [-1.0 - i / 100, -2.0, -3.0]) for i in range(60)])
    assert [q.id for q in found.lines] == [f"q{i}" for i in range(59, 34, -1)]
    assert numbers.questions(found).summary.endswith("0 of 60 picks differ, 25 of 60 shown")


def test_a_choice_without_a_number_is_first_and_has_no_pick(maker):
    (found,) = asked(
        maker,
        [question(0, 0, FIRST), question(1, 0, FIRST)],
        [question(0, 0, SECOND), question(1, 0, [math.nan, -1.0, -1.0])],
    )
    assert [(q.id, q.own, q.change) for q in found.lines] == [
        ("q1", "none", "no number"),
        ("q0", "B", "right to wrong"),
    ]
    assert "2 questions were scored a second time, a noise floor takes 8" in numbers.questions(found).note


def test_skipped_questions_are_in_no_list(maker):
    gone = question(1, 0, [], skipped="no token")
    (found,) = asked(maker, [question(0, 0, FIRST), question(1, 0, FIRST)], [question(0, 0, FIRST), gone])
    assert (found.total, [q.id for q in found.lines]) == (1, ["q0"])
