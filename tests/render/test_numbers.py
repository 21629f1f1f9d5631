"""Numbers and text as a person reads them: units, intervals, counts, and what is not a number."""

import math

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import BYTES, MS, NUMBER, PERCENT, POINTS, RATIO, STEP, UNITS
from kvbench.render.numbers import bytes_text, exact, fact, flatten, one_line, plain, shown, shown_row


def test_a24_t1_bytes_come_with_both_units_under_the_right_label():
    assert bytes_text(2**20) == "1,048,576 B (1.0 MiB, 1.05 MB)"
    assert bytes_text(10**6) == "1,000,000 B (0.9537 MiB, 1.00 MB)"
    assert bytes_text(3_604_480) == "3,604,480 B (3.4375 MiB, 3.60 MB)"
    assert bytes_text(92_274_688) == "92,274,688 B (88.0 MiB, 92.27 MB)"
    assert (bytes_text(0), bytes_text(None)) == ("0 B", "not measured")


def test_a24_t4_missing_zero_and_nan_are_three_things():
    assert [shown(v, BYTES).brief for v in (None, 0)] == ["not measured", "0 B"]
    assert [shown(v, MS).brief for v in (math.nan, math.inf)] == ["NaN ms", "Infinity ms"]
    assert [shown(v, BYTES).state for v in (None, 0, math.nan)] == ["missing", "measured", "nan"]
    assert shown(None, MS, n=0).n == "n = 0"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [   # exact in eight digits: printed whole
        (0.515625, "ratio", "0.515625"), (0.2578125, "ratio", "0.2578125"), (1 / 3, "ratio", "0.333333"),
        (18.8771, "ppl", "18.8771"), (12.34567, "ms", "12.35"), (79.0, "ms", "79.00"), (0.0, "share", "0"),
        (3.2e-7, "error", "3.2e-07"), (1e300, "", "1e+300"), (-0.0123456789, "ratio", "-0.0123457"),
        (613, "step", "613"), (1_234_567.0, "tok/s", "1,234,567"), (11_880.0, "B/token", "11,880"),
        (11_880.25, "B/token", "11,880.25"),
    ],
)  # fmt: skip
def test_digits_follow_the_unit(value, unit, text):
    assert UNITS.get(unit, NUMBER).number(value) == text


def test_intervals_and_signs_of_values():
    got = shown(1.0712345, RATIO, (1.0412345, 1.0993210), 3)
    assert (got.text, got.spread) == ("1.0712", "[1.0412, 1.0993], n = 3")
    got = shown(0.591823, RATIO, (0.0003, 1132.0), 2)
    assert (got.text, got.interval) == ("0.59", "[0.00030, 1,132]")
    assert shown(0.0, PERCENT, (-1000.0, 1e-12)).interval == "[-1,000, 0.000000]"
    for none in ((2.0, 2.0), (math.nan, 3.0), (None, 3.0), (-math.inf, 3.0)):
        assert shown(2.0, RATIO, none).text == "2"
    row = Row("c", "ppl_delta_pct", "", 0.0816, PERCENT, 10, -0.0123, 0.1755)
    assert shown_row(row).brief == "+0.082 % [-0.012, +0.175]"
    assert shown_row(Row("c", "mcq_delta_pt", "", -0.5, POINTS)).text == "-0.5"
    steps = [shown_row(Row("c", "first_divergence", "", n, STEP, 2048)).brief for n in (2048, 2047, 0, None)]
    assert steps == ["none in 2,048", "2,047 step", "0 step", "not measured"]


def test_exact_numbers_read_back_text_stays_on_one_line_and_facts_are_text():
    for value in (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1):
        assert str(type(value)(exact(value))) == str(value)
    assert one_line("a\nb\x1b[31m\u202ec\x00") == "a\\nb\\x1b[31m\\u202ec\\x00"
    assert (one_line("中文, ünï 🙂"), one_line("\udc80")) == ("中文, ünï 🙂", "\\udc80")
    assert one_line("a" * 400 + "b" * 100, 60) == "a" * 39 + "…" + "b" * 20
    texts = ["not measured", "true", "1,234", "0.1", '{"k": [1, "é"]}']
    assert [plain(v) for v in (None, True, 1234, 0.1, {"k": [1, "é"]})] == texts
    assert fact("weights_bytes", 2**20) == ("weights_bytes", "1,048,576 B (1.0 MiB, 1.05 MB)")
    assert fact("device_peak_bytes", None) == ("device_peak_bytes", "not measured")
    assert [fact("x", value)[1] for value in (list(range(9)), [])] == ["9 values", "[]"]
    assert flatten({"b": {"c": 1, "d": [1, 2]}, "a": {}}) == [("b.c", 1), ("b.d", [1, 2]), ("a", {})]
