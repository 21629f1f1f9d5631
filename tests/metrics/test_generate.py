"""Loops, distinct n-grams and the onset of repetition: exact, on texts made for it."""

import random

import pytest

from kvbench.metrics.generate import (
    Loop,
    collapsed,
    degeneration_onset,
    distinct_ngrams,
    first_divergence,
    longest_loop,
)

FRESH = list(range(100, 200))


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [([1, 2, 3, 4, 5, 6], 4, 1.0), ([1, 2, 1, 2, 1, 2], 2, 2 / 5), ([7] * 10, 4, 1 / 7), ([1, 2, 3], 4, None),
     ([1, 2, 3, 4], 4, 1.0)],
)  # fmt: skip
def test_distinct_ngrams_are_counted(tokens, n, share):
    assert distinct_ngrams(tokens, n) == share


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([*FRESH[:20], *[1, 2, 3] * 20], Loop(20, 3, 60)),
        ([*FRESH[:5], *[7] * 12, *FRESH[5:20]], Loop(5, 1, 12)),  # in the middle
        ([*FRESH[:5], *[7] * 11, *FRESH[5:20]], None),  # a token short
        ([*FRESH[:5], *[1, 2, 3, 4, 5, 6] * 2, *FRESH[5:9]], None),  # two copies
        ([*FRESH[:5], *([1, 2, 3, 4, 5] * 3)[:14]], None),  # the third copy is cut
        ([*FRESH[:5], *([1, 2, 3, 4, 5] * 4)[:17]], Loop(5, 5, 17)),  # the fourth is, which may be
        ([*[1, 2] * 8, *FRESH[:5], *[3, 4] * 9], Loop(21, 2, 18)),  # the longer of two
        ([*[1, 2] * 8, *FRESH[:5], *[3, 4] * 8], Loop(0, 2, 16)),  # of equal ones the earlier
        ([5] * 30, Loop(0, 1, 30)),  # not period 2 or 3
        (FRESH, None),
        ([], None),
    ],
)
def test_the_longest_loop_has_its_exact_onset(tokens, loop):
    assert longest_loop(tokens) == loop


def test_a_period_beyond_the_longest_is_no_loop():
    unit = list(range(128))
    assert longest_loop(unit * 3) == Loop(0, 128, 384)
    assert longest_loop([*unit, 128] * 3) is None


@pytest.mark.parametrize(
    ("tokens", "onset"),
    [
        # The unit's first copy is new; so are the first three tokens of the second, whose 4-grams begin in
        # the first.
        ([*FRESH[:20], *[1, 2, 3] * 20], 20 + 3 + 3),
        ([9] * 40, 4),
        ([*FRESH[:30], *[9] * 36], 30 + 4),
        ([*FRESH[:30], *[9] * 35], None),  # 31 repeated tokens, one fewer than a tail has
        ([*[9] * 60, *FRESH[:40]], None),  # it came out of it
        (FRESH, None),
        ([], None),
    ],
)
def test_the_onset_of_repetition_is_exact(tokens, onset):
    assert degeneration_onset(tokens) == onset


def test_a_loop_that_varies_a_little_is_found_too():
    """Every 50th token of a loop is another one: no exact loop reaches the end, the text says nothing new all
    the same."""
    tokens = [*FRESH[:20], *[1, 2, 3, 4, 5] * 40]
    for at in range(70, 200, 50):
        tokens[at] = 900 + at
    assert degeneration_onset(tokens) == 20 + 5 + 3
    assert longest_loop(tokens).length < 60


def test_random_text_does_not_degenerate():
    draw = random.Random(0)
    assert degeneration_onset([draw.randrange(50) for _ in range(2000)]) is None


@pytest.mark.parametrize(
    ("tokens", "native", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [1], 0),
        ([], [], None),
    ],
)
def test_the_first_divergence_is_a_token_or_an_end(tokens, native, at):
    assert first_divergence(tokens, native) == at


@pytest.mark.parametrize(
    ("onset", "native", "fallen"),
    [(None, None, False), (None, 10, False), (63, None, True), (64, None, False), (24, 100, True),
     (25, 100, False),
     (100, 100, False)],
)  # fmt: skip
def test_a_repetition_is_judged_against_natives_own(onset, native, fallen):
    """However soon native ends well."""
    assert collapsed(onset, None, native, 20, 256) is fallen


@pytest.mark.parametrize(
    ("end", "native_useful", "fallen"),
    [(None, 100, False), (0, 1, True), (24, 100, True), (25, 100, False), (63, 256, True), (64, 256, False)],
)
def test_an_end_is_judged_against_what_native_says(end, native_useful, fallen):
    assert collapsed(None, end, None, native_useful, 256) is fallen
