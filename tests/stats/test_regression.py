"""Lines of ITL over the context: exact ones, their intervals, crossings and slopes."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.stats.regression import Line, break_even, fit, slope_ratio

CONTEXTS = [1024, 4096, 16384]


def line(slope, intercept):
    return fit(CONTEXTS, [slope * x + intercept for x in CONTEXTS])


def test_an_exact_line_is_found_with_no_error():
    found = line(0.5, 3.0)
    assert (found.slope, found.intercept, found.points) == (pytest.approx(0.5), pytest.approx(3.0), 3)
    assert (found.slope_interval, found.at(2000)) == (pytest.approx((0.5, 0.5)), pytest.approx(1003.0))


@pytest.mark.parametrize(
    ("itl", "line"),
    [([7.85, 10.29, 20.58], (8.31241e-4, 6.94833)), ([7.27, 7.96, 11.93], (3.09012e-4, 6.83833))],
)
def test_the_published_lines_over_three_contexts(itl, line):
    """ITL of Qwen3-8B on one GPU, ms: bfloat16 KV and FP8 KV; calculated apart with numpy.polyfit."""
    found = fit(CONTEXTS, itl)
    assert (found.slope, found.intercept) == pytest.approx(line, rel=1e-5)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=3, max_size=12, unique=True),
    st.lists(st.floats(0.1, 1e4), min_size=12, max_size=12),
)
def test_slope_and_errors_are_scipys(xs, ys):
    assume(len(set(ys[: len(xs)])) > 1)  # of a constant scipy's errors are NaN
    found, due = fit(xs, ys[: len(xs)]), scipy_stats.linregress(xs, ys[: len(xs)])
    scale = max(ys) / (max(xs) - min(xs))
    assert found.slope == pytest.approx(due.slope, rel=1e-6, abs=1e-8 * scale)
    assert found.error == pytest.approx(due.stderr, rel=1e-6, abs=1e-6 * scale)
    assert found.intercept_error == pytest.approx(
        due.intercept_stderr, rel=1e-6, abs=1e-6 * max(ys) * max(xs) / (max(xs) - min(xs))
    )
    half = float(scipy_stats.t.ppf(0.975, len(xs) - 2)) * found.error
    assert found.slope_interval == pytest.approx((found.slope - half, found.slope + half))


@pytest.mark.parametrize(
    ("xs", "ys"),
    [([1, 2], [1.0, 2.0]), ([1, 2, 2, 1], [1.0, 2.0, 2.0, 1.0]), ([1, 2, 3], [1.0, math.nan, 3.0])],
)
def test_fewer_than_three_contexts_or_a_nan_make_no_line(xs, ys):
    assert fit(xs, ys) is None


@pytest.mark.parametrize(
    ("own", "native", "value", "interval", "note"),
    [
        ((0.001, 12.0), (0.002, 8.0), 4000, (4000, 4000), ""),
        ((0.001, 7.0), (0.002, 8.0), 0.0, (0.0, 0.0), "from the first token"),
        ((0.002, 12.0), (0.002, 8.0), None, None, "parallel"),
        ((0.002, 4.0), (0.001, 8.0), None, None, "up to a context of 4,000"),
        ((0.002, 9.0), (0.001, 8.0), None, None, "at no context"),
    ],
)
def test_break_even_is_where_a_flatter_line_crosses(own, native, value, interval, note):
    found = break_even(line(*own), line(*native))
    assert (found[0], found[1]) == (pytest.approx(value), interval and pytest.approx(interval, rel=1e-4))
    assert note in found[2] if note else found[2] == ""


def test_lines_that_scatter_more_than_they_differ_have_no_break_even():
    own, native = Line(0.0018, 12.0, 1e-4, 1.0, 9, 7168), Line(0.002, 8.0, 1e-4, 1.0, 9, 7168)
    assert break_even(own, native)[0] is None
    assert break_even(Line(0.0016, 12.0, 1e-4, 1.0, 9, 7168), native)[0] == pytest.approx(10_000)


def test_the_interval_ends_where_the_lines_differ_beyond_their_scatter():
    xs = [1000, 1000, 4000, 4000, 16000, 16000]
    own = fit(xs, [13.1, 12.9, 16.2, 15.8, 28.3, 27.7])
    native = fit(xs, [10.1, 9.9, 16.2, 15.8, 40.3, 39.7])
    value, interval, _ = break_even(own, native)
    assert value == pytest.approx(4000, rel=1e-3)
    t = float(scipy_stats.t.ppf(0.975, 4))
    for end in interval:
        variance = sum(
            one.intercept_error**2 - 2 * one.error**2 * one.middle * end + one.error**2 * end**2
            for one in (own, native)
        )
        assert abs(own.at(end) - native.at(end)) == pytest.approx(t * math.sqrt(variance))
    assert interval[0] < value < interval[1]


def test_the_slope_ratio_has_an_interval_of_its_logarithm():
    native, own = Line(0.002, 8.0, 0.0001, 1.0, 9), Line(0.001, 8.0, 0.00005, 1.0, 9)
    found = slope_ratio(own, native)
    half = float(scipy_stats.t.ppf(0.975, 7)) * math.hypot(0.05, 0.05)
    assert found.value == pytest.approx(0.5)
    assert found.interval == pytest.approx((0.5 * math.exp(-half), 0.5 * math.exp(half)))


@pytest.mark.parametrize(("slope", "base"), [(-0.001, 0.002), (0.001, 0.0), (0.0, 0.002)])
def test_a_slope_that_is_not_above_0_has_no_ratio(slope, base):
    assert slope_ratio(Line(slope, 1.0, 0.0, 0.0, 9), Line(base, 1.0, 0.0, 0.0, 9)) is None
