"""TTFT and ITL arithmetic."""

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.stats.intervals import quantile
from kvbench.stats.latency import FailedRequestError, decode_tok_s, prefill_tok_s, request_timing

NINE = [0.2 + 0.1 * i for i in range(9)]  # first at 0.2 s, last at 1.0 s


def test_a20_t1_itl_leaves_ttft_out_and_divides_by_one_less():
    timing = request_timing(0.0, NINE)
    assert timing.ttft_s == 0.2
    assert timing.itl_s == pytest.approx(0.1)  # not 1.0 / 9 = 0.1111, not 0.8 / 9 = 0.0889
    assert (timing.tokens, len(timing.gaps_s)) == (9, 8)


def test_a20_t2_first_chunk_of_four_tokens():
    timing = request_timing(0.0, [0.2, 0.36, 0.52, 0.68, 0.84, 1.0], [4, 1, 1, 1, 1, 1])
    assert (timing.tokens, timing.itl_s) == (9, pytest.approx(0.16))


def test_a20_t2_a_later_chunk_of_many_tokens_is_no_gap_of_one_token():
    timing = request_timing(0.0, [0.2, 1.0], [1, 8])
    assert (timing.itl_s, timing.gaps_s) == (pytest.approx(0.1), pytest.approx([0.1] * 8))


def test_a20_t3_one_output_token_has_no_itl_but_keeps_ttft():
    timing = request_timing(1.0, [1.25])
    assert (timing.ttft_s, timing.itl_s, timing.tokens, timing.gaps_s) == (0.25, None, 1, ())
    assert decode_tok_s(8, timing.gaps_s) is None


@pytest.mark.parametrize(("arrivals", "sizes"), [([], None), ([0.1, 0.2], [0, 0])])
def test_a20_t3_no_output_token_is_a_failed_request(arrivals, sizes):
    with pytest.raises(FailedRequestError, match="failed"):
        request_timing(0.0, arrivals, sizes)


def test_a20_chunks_without_a_token_are_no_arrivals():
    """A role-only chunk before the first token and a usage chunk after the last change nothing."""
    assert request_timing(0.0, [0.05, *NINE, 1.5], [0, *[1] * 9, 0]) == request_timing(0.0, NINE)


def test_a20_t4_one_stall_shows_in_p99_and_max():
    gaps = [10.0] * 99 + [300.0]
    assert (fmean(gaps), max(gaps)) == (12.9, 300.0)
    assert [quantile(gaps, q) for q in (0.9, 0.99)] == [10.0, 300.0]


def test_a20_t5_sequence_gap_and_batch_rate():
    assert (decode_tok_s(8, [0.02] * 15), prefill_tok_s(8 * 512, 0.5)) == (pytest.approx(8 / 0.02), 8192.0)


@pytest.mark.parametrize(("start", "arrivals"), [(0.0, [0.2, 0.1]), (1.0, [0.5])])
def test_a21_t4_moments_that_go_backwards_are_refused(start, arrivals):
    with pytest.raises(ValueError, match="monotonic"):
        request_timing(start, arrivals)


moments = st.lists(st.tuples(st.floats(1e-6, 10), st.integers(0, 5)), min_size=1, max_size=30)


@settings(deadline=None)
@given(moments, st.integers(1, 64))
def test_identities(steps, batch):
    arrivals, now = [], 0.0
    for gap, _ in steps:
        now += gap
        arrivals.append(now)
    sizes = [1] + [n for _, n in steps[1:]]
    timing = request_timing(0.0, arrivals, sizes)
    last = max(at for at, n in zip(arrivals, sizes, strict=True) if n)
    assert timing.ttft_s + math.fsum(timing.gaps_s) == pytest.approx(last)
    assert len(timing.gaps_s) == timing.tokens - 1
    if timing.itl_s is not None:
        assert decode_tok_s(batch, timing.gaps_s) == pytest.approx(batch / timing.itl_s)
    assert prefill_tok_s(batch * 100, timing.ttft_s) * timing.ttft_s == pytest.approx(batch * 100)
