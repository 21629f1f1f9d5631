"""Lines of ITL over the context: exact ones, their intervals, crossings and slopes."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.stats.regression import Line, break_even, fit, slope_ratio

CONTEXTS = [1024, 4096, 16384]


def line(slope: float, intercept: float) -> Line:
    fitted = fit(CONTEXTS, [slope * x + intercept for x in CONTEXTS])
    assert fitted is not None
    return fitted


def test_an_exact_line_is_found_with_no_error() -> None:
    found = line(0.5, 3.0)
    assert (found.slope, found.intercept, found.points) == (pytest.approx(0.5), pytest.approx(3.0), 3)
    assert found.slope_interval == pytest.approx((0.5, 0.5))
    assert found.at(2000) == pytest.approx(1003.0)


def test_the_published_lines_over_three_contexts() -> None:
    """ITL of Qwen3-8B on one GPU, ms: bfloat16 KV and FP8 KV; calculated apart with numpy.polyfit."""
    native, fp8 = fit(CONTEXTS, [7.85, 10.29, 20.58]), fit(CONTEXTS, [7.27, 7.96, 11.93])
    assert native is not None
    assert fp8 is not None
    assert (native.slope, native.intercept) == (
        pytest.approx(8.31241e-4, rel=1e-5),
        pytest.approx(6.94833, rel=1e-5),
    )
    assert (fp8.slope, fp8.intercept) == (
        pytest.approx(3.09012e-4, rel=1e-5),
        pytest.approx(6.83833, rel=1e-5),
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=3, max_size=12, unique=True),
    st.lists(st.floats(0.1, 1e4), min_size=12, max_size=12),
)
def test_slope_and_errors_are_scipys(xs: list[int], ys: list[float]) -> None:
    assume(len(set(ys[: len(xs)])) > 1)  # of a constant scipy's errors are NaN
    found, due = fit(xs, ys[: len(xs)]), scipy_stats.linregress(xs, ys[: len(xs)])
    assert found is not None
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
def test_fewer_than_three_contexts_or_a_nan_make_no_line(xs: list[int], ys: list[float]) -> None:
    assert fit(xs, ys) is None


def test_break_even_is_where_the_lines_cross() -> None:
    value, interval, note = break_even(line(0.001, 12.0), line(0.002, 8.0))
    assert (value, note) == (pytest.approx(4000), "")
    assert interval == pytest.approx((4000, 4000), rel=1e-4)


def test_parallel_lines_have_no_break_even() -> None:
    value, interval, why = break_even(line(0.002, 12.0), line(0.002, 8.0))
    assert (value, interval) == (None, None)
    assert "parallel" in why


def test_lines_that_scatter_more_than_they_differ_have_no_break_even() -> None:
    own, native = Line(0.0018, 12.0, 1e-4, 1.0, 9, 7168), Line(0.002, 8.0, 1e-4, 1.0, 9, 7168)
    assert break_even(own, native)[0] is None
    assert break_even(Line(0.0016, 12.0, 1e-4, 1.0, 9, 7168), native)[0] == pytest.approx(10_000)


def test_the_interval_ends_where_the_lines_differ_beyond_their_scatter() -> None:
    xs = [1000, 1000, 4000, 4000, 16000, 16000]
    own = fit(xs, [13.1, 12.9, 16.2, 15.8, 28.3, 27.7])
    native = fit(xs, [10.1, 9.9, 16.2, 15.8, 40.3, 39.7])
    assert own is not None
    assert native is not None
    value, interval, _ = break_even(own, native)
    assert value == pytest.approx(4000, rel=1e-3)
    assert interval is not None
    t = float(scipy_stats.t.ppf(0.975, 4))
    for end in interval:
        variance = sum(
            one.intercept_error**2 - 2 * one.error**2 * one.middle * end + one.error**2 * end**2
            for one in (own, native)
        )
        assert abs(own.at(end) - native.at(end)) == pytest.approx(t * math.sqrt(variance))
    assert interval[0] < value < interval[1]


def test_a_line_below_from_the_start_breaks_even_at_0() -> None:
    value, interval, why = break_even(line(0.001, 7.0), line(0.002, 8.0))
    assert (value, interval) == (0.0, (0.0, 0.0))
    assert "from the first token" in why


@pytest.mark.parametrize(
    ("intercept", "word"), [(4.0, "only up to a context of 4,000 tokens"), (9.0, "at no context")]
)
def test_a_steeper_line_has_no_context_from_which_it_gains(intercept: float, word: str) -> None:
    value, interval, why = break_even(line(0.002, intercept), line(0.001, 8.0))
    assert (value, interval) == (None, None)
    assert word in why


def test_the_slope_ratio_has_an_interval_of_its_logarithm() -> None:
    native, own = Line(0.002, 8.0, 0.0001, 1.0, 9), Line(0.001, 8.0, 0.00005, 1.0, 9)
    found = slope_ratio(own, native)
    assert found is not None
    half = float(scipy_stats.t.ppf(0.975, 7)) * math.hypot(0.05, 0.05)
    assert found.value == pytest.approx(0.5)
    assert found.interval == pytest.approx((0.5 * math.exp(-half), 0.5 * math.exp(half)))


@pytest.mark.parametrize(("slope", "base"), [(-0.001, 0.002), (0.001, 0.0), (0.0, 0.002)])
def test_a_slope_that_is_not_above_0_has_no_ratio(slope: float, base: float) -> None:
    assert slope_ratio(Line(slope, 1.0, 0.0, 0.0, 9), Line(base, 1.0, 0.0, 0.0, 9)) is None
