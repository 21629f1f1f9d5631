"""Token agreement from hand-written records: shares, divergences, near-ties, lengths."""

import math

import pytest
from scipy import stats as scipy_stats

from tests.factories.runs.made import BASE, CAND, MadeRun


def tokens(sequence, aa=None, margins=None, again=None, **facts):
    shared = {"steps": len(sequence), "prompt_tokens": 64, "prompt_sha": "p"}
    flips = {} if aa is None else {"aa_disagreements": aa}
    samples = {"tokens": sequence, "margins": margins or [0.5 + i for i in range(len(sequence))]}
    return samples | ({"aa_margins": again} if again else {}), {**shared, **flips, **facts}


def run_of(own, native, dtype="bfloat16"):
    return MadeRun(dtype=dtype).measure("agreement", tokens(own), native)


def test_agreement_shares_and_first_divergence():
    own = [7] * 2048
    own[100] = own[2000] = 8
    run = run_of(own, tokens([7] * 2048, aa=[5]))
    row = run.row("top1_teacher_forced")
    assert row.low < row.value == 2046 / 2048 < row.high
    assert (run.row("first_divergence").value, run.row("first_divergence").note) == (100, "")
    assert run.row("divergence_margin").value == 100.5
    assert run.row("aa_disagreement").value == run.row("aa_disagreement", BASE).value == 1 / 2048


def test_no_divergence_is_censored():
    run = run_of([7] * 32, tokens([7] * 32, aa=[]))
    assert (run.row("top1_teacher_forced").value, run.row("aa_disagreement").value) == (1.0, 0.0)
    assert run.row("first_divergence").value == run.row("real_divergence").value == 32
    assert run.row("first_divergence").note.startswith("censored")
    assert run.row("divergence_margin").value is None


def test_steps_of_one_text_are_clustered_by_blocks_of_64():
    """Five differing steps in one of 32 blocks: the residuals of the other 31 are what 5 / 32 makes them."""
    row = run_of([7] * 100 + [8] * 5 + [7] * 1943, tokens([7] * 2048, aa=[])).row("top1_teacher_forced")
    error = math.sqrt(32 / 31 * ((5 - 5 / 32) ** 2 + 31 * (5 / 32) ** 2)) / 2048
    p, half = 2043 / 2048, float(scipy_stats.t.ppf(0.975, 31)) * error
    worth = 1.959963985**2 * p * (1 - p) / half**2
    assert worth == pytest.approx(2048 / 5, rel=0.1)  # five steps that differ together are worth one
    spread = 1.959963985 * math.sqrt(p * (1 - p) / worth + 0.9603647 / worth**2)
    ends = [(p + 1.9207294 / worth + sign * spread) / (1 + 3.8414588 / worth) for sign in (-1, 1)]
    assert [row.low, row.high] == pytest.approx(ends, rel=1e-6)
    assert (row.value, row.n, row.units, row.note) == (p, 2048, 32, "32 blocks of 64 steps")


def test_steps_without_a_difference_have_the_interval_of_as_many_samples():
    run = run_of([7] * 2048, tokens([7] * 2048, aa=[]))
    assert run.row("top1_teacher_forced").low == pytest.approx(2048 / (2048 + 3.8414588))
    assert run.row("aa_disagreement").high == pytest.approx(3.8414588 / (2048 + 3.8414588))
    few = run_of([7] * 64, tokens([7] * 64, aa=[])).row("top1_teacher_forced")
    assert (few.value, few.low) == (1.0, None)


def test_the_line_end_before_the_prompt_is_a_share_of_the_baselines_own_steps():
    samples, facts = tokens([7] * 256, aa=[])
    run = run_of([7] * 256, (samples | {"prefix_tokens": [8] * 3 + [7] * 253}, facts))
    for cell in (BASE, CAND):
        row = run.row("prefix_disagreement", cell)
        assert row.low < row.value == 3 / 256 < row.high
        assert (row.n, row.baseline) == (256, None)
    none = (samples | {"prefix_tokens": []}, facts | {"prefix": "none: the model has 9 positions"})
    row = run_of([7] * 256, none).row("prefix_disagreement")
    assert (row.value, row.note) == (None, "none: the model has 9 positions")
    assert run_of([7] * 256, (samples, facts)).row("prefix_disagreement").value is None


def test_a_divergence_within_the_noise_floor_is_a_near_tie():
    row = run_of([7, 8, 7], tokens([7, 7, 7], aa=[1])).row("first_divergence")
    assert (row.value, "near-tie" in row.note) == (1, True)


def test_the_margin_noise_separates_a_near_tie_from_a_real_divergence():
    """Margins moved by at most 0.3 between the baseline's two runs: step 1 (margin 0.2) is a near-tie, step 3
    (3.5) is not."""
    native = tokens([7] * 5, aa=[], margins=[0.5, 0.2, 2.5, 3.5, 4.5], again=[0.5, 0.2, 2.2, 3.4, 4.5])
    run = run_of([7, 8, 7, 8, 7], native)
    assert run.row("aa_margin_noise").value == run.row("aa_margin_noise", BASE).value == pytest.approx(0.3)
    assert (run.row("first_divergence").value, run.row("real_divergence").value) == (1, 3)
    assert "near-tie" in run.row("first_divergence").note
    assert "1 of 2" in run.row("real_divergence").note
    ties = run_of([7, 8, 7, 7, 7], native).row("real_divergence")
    assert (ties.value, ties.note.startswith("censored")) == (5, True)


@pytest.mark.parametrize(
    ("own", "real"),
    [([8, 7, 7, 7], 4), ([7, 8, 7, 7], 1), ([8, 8, 7, 7], 1), ([7, 7, 7, 8], 4), ([8, 7, 8, 8], 2)],
)
def test_a_margin_of_the_noise_itself_is_a_near_tie_and_any_above_is_not(own, real):
    """Noise of exactly 0.25; margins 0.25 and the next number above it. The baseline itself flips step 3."""
    above = math.nextafter(0.25, 1)
    native = tokens([7] * 4, aa=[3], margins=[0.25, above, 2.0, 0.125], again=[0.25, above, 1.75, 0.125])
    run = run_of(own, native)
    assert (run.row("aa_margin_noise").value, run.row("real_divergence").value) == (0.25, real)


def test_a_margin_that_flipped_went_through_zero():
    native = tokens([7] * 3, aa=[1], margins=[1.0, 0.04, 1.0], again=[1.0, 0.03, 1.0])
    assert run_of([7] * 3, native).row("aa_margin_noise").value == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("dtype", "moved", "noise"),
    [("float32", 0.05, 0.05), ("float32", 0.0625, None), ("float16", 0.125, 0.125), ("float16", 0.25, None),
     ("bfloat16", 0.5, 0.5), ("bfloat16", 0.5625, None)],
)  # fmt: skip
def test_a_margin_that_no_rounding_moves_is_no_noise(dtype, moved, noise):
    """As a floor, one wild margin would make near-ties of all that the candidate changed."""
    native = tokens([7] * 4, aa=[], margins=[0.0, 0.25, 2.0, 0.03], again=[moved, 0.25, 2.0, 0.03])
    run = run_of([7, 7, 8, 7], native, dtype)
    floor, real = run.row("aa_margin_noise"), run.row("real_divergence")
    assert (floor.value, real.value) == (noise, None if noise is None else 2)
    assert floor.note == real.note if noise is None else floor.note == ""
    assert ("step 0" in floor.note, run.row("first_divergence").value) == (noise is None, 2)


def test_a_margin_that_is_no_number_stays_none():
    native = tokens([7] * 2, aa=[], again=[math.nan, 9.0])
    assert math.isnan(run_of([7] * 2, native).row("aa_margin_noise").value)
    old = run_of([7, 8, 7], tokens([7, 7, 7], aa=[]))
    assert (old.row("aa_margin_noise").value, old.row("real_divergence").value) == (None, 1)


@pytest.mark.parametrize(
    ("own", "native", "ends", "ratio"),
    [
        *((own, [7, 7, 7, 2, 2], {"end_ids": [2]}, ratio)
          for own, ratio in (([7, 7, 7, 2, 7], 1.0), ([7, 2, 7, 7, 7], 0.5), ([7, 7, 7, 7, 7], 1.25))),
        ([7] * 4, [7] * 4, {"end_ids": [2]}, 1.0),  # both go on
        ([7] * 4, [7] * 4, {}, None),  # there is no end
    ],
)  # fmt: skip
def test_length_up_to_the_token_that_ends_a_text(own, native, ends, ratio):
    assert run_of(own, tokens(native, aa=[], **ends)).row("length_ratio").value == ratio


def test_other_prompts_are_not_compared():
    run = run_of([7] * 9, tokens([7] * 9, prompt_sha="q", aa=[]))
    for name in ("top1_teacher_forced", "first_divergence", "real_divergence", "length_ratio"):
        assert run.row(name).value is None
        assert "prompt_sha is 'p' here and 'q'" in run.row(name).note
