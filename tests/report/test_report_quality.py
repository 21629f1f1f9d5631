"""Figures and drill-downs of quality from invented records: exact numbers, worst first, older records too."""

import math

import pytest

from kvbench.report.figures import drilldown
from kvbench.report.figures.plots import agreement_svg
from kvbench.report.figures.quality import _curve
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


def test_a_percentile_of_0_is_only_in_the_table(maker):
    own = [text_of(3.0, [0.0] * 3, d) for d in range(3)]
    zero = figure(build(perplexed(maker, own=own, tokens=[[0.0] * 3] * 3).judged), "quality")
    usual = figure(build(perplexed(maker).judged), "quality")
    assert ["percentile of 0" in found.caption for found in (zero, usual)] == [True, False]
    assert texts(zero.grids[0].rows[0])[1].startswith("0 nat")


def test_chunks_are_sorted_worst_first_and_positions_hold_the_tokens_of_their_bucket(maker):
    chunks = build(perplexed(maker).judged).chunks[0]
    assert [(c.index, c.document, c.tokens) for c in chunks.lines] == [(1, "1", 3), (0, "0", 3), (2, "2", 3)]
    assert [round(c.kld, 12) for c in chunks.lines] == [0.3, 0.2, round(0.4 / 3, 12)]
    assert [round(c.delta, 12) for c in chunks.lines] == [round(1 / 3, 12), 0, round(2 / 3, 12)]
    assert (chunks.total, chunks.documents, chunks.subject) == (3, 3, "int8_sym · wikitext2")
    first, second = chunks.positions
    assert (first.low, first.high, first.tokens, second.low, second.high, second.tokens) == (0, 1, 6, 2, 3, 3)
    assert first.kld == clustered_mean([0.1 + 0.2, 0.0, 0.4], [2, 2, 2], range(3))
    assert (first.most, second.most) == (0.4, 0.9)
    assert second.kld.value == pytest.approx(0.4)
    assert first.delta == clustered_ratio([0.0, 0.5, 1.0], [2, 2, 2], range(3))
    sampled = build(perplexed(maker, kept=[0.1, 0.9]).judged).chunks[0]
    assert [p.kld for p in sampled.positions] == [None, None]
    assert drilldown.position_grid(sampled).columns == ("Position", "NLL delta")


def test_old_records_without_positions_or_divergence_still_list_their_chunks(maker):
    bare = [{"tokens": 3, "nll": 3.0 + d, "document": d} for d in range(3)]
    both = {"native": [c | {"nll": 3.0} for c in bare], "int8_sym": bare}
    kinds = {f"perplexity__{fmt}": ({"chunks": own}, {"scored": 9}) for fmt, own in both.items()}
    view = build(measured(small(maker), **kinds).judged)
    assert [c.index for c in view.chunks[0].lines] == [2, 1, 0]
    assert view.chunks[0].positions == view.kld == ()


def test_records_of_other_data_or_other_chunks_are_not_compared(maker):
    chunks = [c | {"document": 7} for c in NATIVE]
    for native in (({"chunks": NATIVE}, FACTS | {"data_sha": "z"}), ({"chunks": chunks}, FACTS)):
        made = measured(small(maker), perplexity__native=native, perplexity__int8_sym=quality())
        assert build(made.judged).chunks == ()


def lines_of(maker, **kinds):
    return build(measured(small(maker), **agreement(**kinds)).judged).agreement


def test_the_curve_is_the_share_so_far(maker):
    own, again = lines_of(maker, differ=(3, 100), flips=(50,))
    curve = dict(own.points)
    shares = [1, 1, 3 / 4, 4 / 5, 99 / 100, 99 / 101, 126 / 128]
    assert [curve[i] for i in (0, 2, 3, 4, 99, 100, 127)] == shares
    assert (own.first, own.at_first, own.steps, own.again) == (3, 0.75, 128, False)
    assert (again.again, again.first, dict(again.points)[127]) == (True, None, 127 / 128)
    assert again.sentence.startswith("1 of 128 steps differ")
    old = lines_of(maker, differ=(3,), facts={"aa_disagreements": None})
    assert [line.again for line in old] == [False]  # a baseline that was not repeated
    points = _curve(range(0, 2048, 2), 2048)
    assert len(points) < 900
    assert (points[0], points[-1], _curve([], 0)) == ((0, 0.0), (2047, 0.5), ())
    assert all(share == 1 - math.ceil((step + 1) / 2) / (step + 1) for step, share in points)


def test_a_real_divergence_a_near_tie_and_one_that_cannot_be_judged(maker):
    margins = [1.0] * STEPS
    margins[3] = 0.005
    real, _ = lines_of(maker, differ=(3, 100))
    tie, _ = lines_of(maker, differ=(3, 100), margins=margins)
    alone, _ = lines_of(maker, differ=(3,), margins=margins)
    none, _ = lines_of(maker)
    made = agreement(differ=(3,))
    made["agreement__native"][0]["aa_margins"] = [5.0] * STEPS
    unknown = build(measured(small(maker), **made).judged).agreement[0]
    lines = (real, tie, alone, unknown, none)
    assert [line.real for line in lines] == [True, False, False, None, None]
    assert [line.margin for line in lines] == [1.0, 0.005, 0.005, 1.0, None]
    assert [line.first for line in lines] == [3, 3, 3, 3, None]
    assert [line.passage is None for line in lines] == [False] * 4 + [True]
    assert "top-2 margin is 1 logit" in real.sentence
    assert tie.sentence.endswith("the first real divergence is at step 100")
    assert alone.sentence.endswith("no real divergence follows")
    assert "step 0 moved by 4 logit" in unknown.sentence
    assert none.sentence.startswith("agrees on 128 of 128 steps (")
    opened = [agreement_svg(found, "t").count("fill-opacity: 0") for found in ([real], [tie])]
    assert opened == [0, 1]  # the marker of a near-tie is open


def test_the_texts_at_the_divergence_are_shown(maker):
    stored = {"text_before": "The cat", "native_text": " sat\non", "continuation_text": " lay"}
    page = render(build(measured(small(maker), **agreement(differ=(3,), continuation=stored)).judged))
    assert [text for text in stored.values() if f'<pre tabindex="0">{text}</pre>' not in page] == []
    bare = lines_of(maker, differ=(3,))[0].passage
    assert (bare.before, bare.native, bare.candidate) == ("text not stored",) * 3
    long = lines_of(maker, differ=(3,), continuation={"native_text": "n" * 1001})[0].passage
    assert long.native == "n" * 1000 + " … (1,001 characters in all)"


def asked(maker, natives, owns, noise=0.01):
    natives = [q | {"aa_scores": [s + noise for s in q["scores"]]} for q in natives]
    kinds = {f"mcq__{fmt}": ({"questions": q}, {}) for fmt, q in (("native", natives), ("int8_sym", owns))}
    return build(measured(small(maker), **kinds).judged).questions


def test_changed_picks_come_first_and_right_to_wrong_before_the_others(maker):
    answers = (0, 2, 1, 0, 0)
    before = [FIRST, FIRST, FIRST, FIRST, CLOSE]
    after = [[-1.5, -2.0, -3.0], SECOND, SECOND, SECOND, [-1.01, -1.0, -3.0]]
    same = [question(i, 0, FIRST) for i in range(5, 9)]
    natives, owns = (
        [question(i, gold, scores[i]) for i, gold in enumerate(answers)] + same for scores in (before, after)
    )
    (found,) = asked(maker, natives, owns)
    assert [q.id for q in found.lines] == ["q3", "q4", "q2", "q1", "q0", "q5", "q6", "q7", "q8"]
    changes = ["right to wrong", "right to wrong", "wrong to right", "wrong to wrong", ""]
    assert [q.change for q in found.lines[:5]] == changes
    assert [q.real for q in found.lines[:5]] == [True, False, True, True, None]
    assert (found.flips, found.total, found.noise) == (4, 9, pytest.approx(0.01))
    line = found.lines[0]
    assert (line.gold, line.native, line.own) == ("A", "A", "B")
    assert (line.native_margin, line.margin, line.moved) == (1.0, 1.0, 1.0)
    assert drilldown.question_grid(found).rows[1][5] == "right to wrong (near-tie)"


def test_only_the_worst_are_listed_and_only_what_both_scored(maker):
    many = [question(i, 0, FIRST) for i in range(60)]
    (found,) = asked(maker, many, [question(i, 0, [-1.0 - i / 100, -2.0, -3.0]) for i in range(60)])
    assert [q.id for q in found.lines] == [f"q{i}" for i in range(59, 34, -1)]
    assert (found.flips, found.total) == (0, 60)
    (found,) = asked(maker, many[:2], [many[0], question(1, 0, [], skipped="no token")])
    assert (found.total, [q.id for q in found.lines]) == (1, ["q0"])
    # A choice without a number is first and has no pick.
    (found,) = asked(maker, many[:2], [question(0, 0, SECOND), question(1, 0, [math.nan, -1.0, -1.0])])
    changes = [("q1", "none", "no number"), ("q0", "B", "right to wrong")]
    assert [(q.id, q.own, q.change) for q in found.lines] == changes
    assert found.noise is None
    assert found.why in drilldown.question_grid(found).note
