"""Multiple choice from hand-written records: accuracies, paired differences, noise floors."""

import math

import pytest
from scipy import stats as scipy_stats

from kvbench.metrics.declare.units import NAT
from kvbench.metrics.mcq import best_choices
from tests.factories.runs.made import BASE, CAND, MadeRun

RIGHT, WRONG = (-1.0, -2.0), (-2.0, -1.0)


def question(key, answer, *scores, **more):
    base = {"id": key, "subject": "s", "answer": answer, "scores": list(scores), "tokens": [1] * len(scores)}
    pick = max(range(len(scores)), key=scores.__getitem__) if scores else None
    return {**base, "chars": [1] * len(scores), "pick": pick, "truncated": False, "skipped": None, **more}


def twice(key, scores, again, **more):
    """A question of the baseline that was scored again."""
    return question(key, 0, *scores, aa_scores=list(again), **more)


def asked(*questions, **facts):
    shared = {"task": "mmlu", "shots": 5, "choice_ids": {"A": [1]}, "total": len(questions), "data_sha": "d"}
    return {"questions": list(questions)}, {**shared, "prompt_policy": "p", "bos": "none", **facts}


def run_of(own, native, dtype="float32", **facts):
    sides = asked(*own), asked(*native, **facts)
    return MadeRun(dtype=dtype).measure("mcq", *sides, variant="mmlu 5-shot", shots=5)


def test_a18_t3_summed_per_token_and_per_character():
    """A: -1.0 over 2 tokens, B: -2.0 over 8: summed picks A, per token B."""
    q = question(0, 0, -1.0, -2.0, tokens=[2, 8], chars=[1, 1])
    run = run_of([q], [q])
    names = ("mcq_accuracy", "mcq_accuracy_norm", "mcq_accuracy_norm_char")
    assert [run.row(name).value for name in names] == [1.0, 0.0, 1.0]
    assert run.row("mcq_accuracy").variant == "mmlu 5-shot"


def test_a18_t5_skipped_questions_are_counted_and_leave_the_denominator():
    cut, skipped = question(1, 0, -3.0, -2.0, truncated=True), question(2, 0, skipped="empty choice")
    qs = [question(0, 0, *RIGHT), cut, skipped]
    run = run_of(qs, qs)
    assert (run.row("mcq_accuracy").value, run.row("mcq_accuracy").n) == (0.5, 2)
    assert run.row("mcq_accuracy").note == "2 of 3 scored, 1 skipped, 0 tied"
    assert (run.row("mcq_scored").value, run.row("mcq_scored").n) == (2, 3)
    assert run.row("truncated_share").value == 1 / 3


def test_macro_average_and_ties():
    qs = [question(i, 0, *RIGHT, subject="big") for i in range(3)]
    qs += [question(3, 1, *RIGHT, subject="small"), question(4, 1, -1.0, -1.0, subject="tied")]
    run = run_of(qs, qs)
    assert (run.row("mcq_accuracy").value, run.row("mcq_macro").value) == (3 / 5, pytest.approx(1 / 3))
    assert "1 tied" in run.row("mcq_accuracy").note


def test_a_choice_without_a_number_makes_the_shares_nan():
    native = [question(0, 0, *RIGHT), question(1, 0, *RIGHT)]
    run = run_of([native[0], question(1, 0, math.nan, -2.0)], native)
    names = "accuracy accuracy_norm macro delta_pt mde_pt agreement mcnemar_p real_flips recovery"
    assert all(math.isnan(run.row(f"mcq_{name}").value) for name in names.split())


def test_paired_difference_and_mcnemar():
    """Of 20 paired questions, 1 gained and 4 lost; question 20 was skipped on one side and does not count."""
    outcomes = [(RIGHT, WRONG)] + [(WRONG, RIGHT)] * 4 + [(RIGHT, RIGHT)] * 10 + [(WRONG, WRONG)] * 5
    own = [question(i, 0, *a) for i, (a, _) in enumerate(outcomes)] + [question(20, 0, *RIGHT)]
    native = [
        *(question(i, 0, *b) for i, (_, b) in enumerate(outcomes)),
        question(20, 0, skipped="empty choice"),
    ]
    run = run_of(own, native)
    row, mde, recovery = (run.row(f"mcq_{name}") for name in ("delta_pt", "mde_pt", "recovery"))
    assert (row.value, row.n, row.baseline) == (-15.0, 20, BASE)
    half = 1.959964 * math.sqrt((7 / 22 - (3 / 22) ** 2) / 22)
    assert (row.low, row.high) == pytest.approx((100 * (-3 / 22 - half), 100 * (-3 / 22 + half)), rel=1e-6)
    found = ("1 gained, 4 lost of 20", "not worse by more than 37 pt", "equivalent within 37 pt")
    assert [words for words in found if words not in row.note] == []
    # The half width of that interval times (1.959964 + 0.841621) / 1.959964.
    assert mde.value == pytest.approx(100 * half * (1 + 0.8416212336 / 1.9599639845), rel=1e-6)
    assert (mde.n, mde.baseline, run.row("mcq_mcnemar_p").value) == (20, BASE, pytest.approx(2 * 6 / 32))
    shares = ("agreement", "right_to_wrong", "wrong_to_right", "wrong_to_wrong")
    assert [run.row(f"mcq_{name}").value for name in shares] == [15 / 20, 4 / 20, 1 / 20, 0]
    assert recovery.value == pytest.approx(11 / 14)  # the baseline answers 14 of 20, the candidate 11
    assert (recovery.low, recovery.high) == pytest.approx((1 + row.low / 70, 1 + row.high / 70))


def test_a_choice_that_changes_between_two_wrong_ones_is_a_flip_of_its_own():
    native = [question(i, 0, -3.0, -1.0, -2.0) for i in range(4)]
    run = run_of([*native[:3], question(3, 0, -3.0, -2.0, -1.0)], native)
    flips = [run.row(f"mcq_{m}").value for m in ("right_to_wrong", "wrong_to_right", "wrong_to_wrong")]
    assert (flips, run.row("mcq_delta_pt").value, run.row("mcq_recovery").value) == ([0, 0, 0.25], 0, None)


def test_the_noise_floor_of_multiple_choice():
    """Nine questions, eight of them scored again, two of these behind the line end; one pick of eight flips,
    one of two."""
    native = [
        twice(0, [-1.0, -2.0], [-1.0, -2.25], prefix_scores=[-1.0, -2.0]),
        twice(1, [-1.0, -1.125], [-1.125, -1.0], prefix_scores=[-2.0, -1.0]),
        *(twice(i, [-1.0, -3.0], [-1.0, -3.0]) for i in range(2, 8)),
        question(8, 0, -1.0, -3.0),
    ]
    run = run_of([question(i, 0, *RIGHT) for i in range(9)], native, "bfloat16")
    low, high = scipy_stats.binomtest(1, 8).proportion_ci(method="wilson")
    for cell in (BASE, CAND):
        aa, prefix, noise = (
            run.row(f"mcq_{m}", cell) for m in ("aa_disagreement", "prefix_disagreement", "aa_score_noise")
        )
        assert (aa.value, aa.n, prefix.value, prefix.n) == (1 / 8, 8, 1 / 2, 2)
        assert (aa.low, aa.high) == pytest.approx((low, high))
        assert (noise.value, noise.n, noise.unit) == (0.25, 8, NAT)


def test_a_changed_pick_is_real_only_beyond_twice_the_noise():
    """Scores moved by at most 0.25, so two choices that are 0.5 apart may change places; the next number
    above may not."""
    native = [
        twice(0, [-1.0, -5.0, -2.0], [-1.0, -5.25, -2.0]),
        question(1, 0, -1.0, -1.5, -9.0),
        question(2, 0, -1.0, math.nextafter(-1.5, -2), -9.0),
        question(3, 0, -1.0, -1.25, -9.0),
        *(twice(i, [-1.0, -5.0, -9.0], [-1.0, -5.0, -9.0]) for i in range(4, 11)),
    ]

    def flipped(*flips):
        own = [question(i, 0, -1.0, -0.5 if i in flips else -2.0, -9.0) for i in range(11)]
        return run_of(own, native, "bfloat16").row("mcq_real_flips")

    assert [flipped(i).value for i in range(4)] == [1 / 11, 0, 1 / 11, 0]
    assert (flipped(1, 2, 3).value, "2 of 3" in flipped(1, 2, 3).note) == (1 / 11, True)
    assert (flipped().value, flipped().note, flipped().n) == (0, "", 11)


@pytest.mark.parametrize(
    ("dtype", "tokens", "moved", "noise"),
    [("float32", 1, 0.03125, 0.03125), ("float32", 1, 0.0625, None), ("float32", 2, 0.0625, 0.0625),
     ("float16", 1, 0.25, None),
     ("bfloat16", 1, 0.5, 0.5), ("bfloat16", 8, 4.0, 4.0), ("bfloat16", 8, 4.125, None)],
)  # fmt: skip
def test_a_score_that_no_rounding_moves_is_no_noise(dtype, tokens, moved, noise):
    """As a floor, one wild score would make near-ties of all flips; longer choices may move by as much
    more."""
    native = [twice(i, [-1.0, -9.0], [-1.0, -9.0]) for i in range(8)]
    native[5] |= {"aa_scores": [-1.0, -9.0 - moved], "tokens": [1, tokens]}
    run = run_of([question(i, 0, -1.0, 0.0 if i == 3 else -9.0) for i in range(8)], native, dtype)
    floor, real = run.row("mcq_aa_score_noise"), run.row("mcq_real_flips")
    assert (floor.value, floor.n, run.row("mcq_agreement").value) == (noise, 8, 7 / 8)
    assert real.value == (None if noise is None else 0.0 if 2 * noise >= 8 else 1 / 8)
    assert ("question 5" in floor.note) == ("question 5" in real.note) == (noise is None)


@pytest.mark.parametrize(("again", "noise"), [(1, None), (7, None), (8, 0.0)])
def test_a_noise_floor_needs_eight_questions(again, noise):
    native = [twice(i, RIGHT, RIGHT) if i < again else question(i, 0, *RIGHT) for i in range(9)]
    run = run_of([question(i, 0, *RIGHT) for i in range(9)], native)
    assert (run.row("mcq_aa_score_noise").value, run.row("mcq_real_flips").value) == (noise, noise)
    assert (f"{again} question" in run.row("mcq_aa_score_noise").note) == (noise is None)


def test_without_a_second_run_no_flip_is_called_real_or_noise():
    q = question(0, 0, *RIGHT)
    for name in ("real_flips", "aa_disagreement", "aa_score_noise", "prefix_disagreement"):
        row = run_of([q], [q]).row(f"mcq_{name}")
        assert (row.value, "aa_limit" in row.note) == (None, True)
    broken = run_of([q], [twice(0, RIGHT, [math.nan, -2.0])])
    assert math.isnan(broken.row("mcq_aa_disagreement").value)
    assert math.isnan(broken.row("mcq_aa_score_noise").value)
    unfit = run_of([q], [twice(0, RIGHT, RIGHT)], prefix="none: no line end")
    assert unfit.row("mcq_prefix_disagreement").note == "none: no line end"


def test_other_questions_are_not_compared():
    q = question(0, 0, *RIGHT)
    for native, facts, words in (
        (q, {"shots": 0}, "shots is 5 here and 0"),
        ({**q, "answer": 1}, {}, "another answer"),
        ({**q, "id": 9}, {}, "no question was scored on both sides"),
    ):
        row = run_of([q], [native], **facts).row("mcq_delta_pt")
        assert (row.value, words in row.note) == (None, True)


def test_a_choice_without_a_number_leaves_its_question_without_a_pick():
    broken = question(0, 1, math.nan, -1.0)
    assert best_choices([math.nan, -1.0], [1, 1]) == best_choices([-1.0, -2.0], [1, 0]) == []
    assert math.isnan(run_of([broken], [question(0, 1, *RIGHT)]).row("mcq_accuracy").value)
