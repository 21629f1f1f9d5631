"""Multiple choice with the prompts and scoring of lm-evaluation-harness; Wilson and Bonett-Price intervals
and the exact McNemar test on paired questions."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from kvbench.metrics.agreement import NEAR_TIE
from kvbench.metrics.declare.change import share_change
from kvbench.metrics.declare.metric import Effect, Measured, Metric, Table, Unable
from kvbench.metrics.declare.units import NAT, P_VALUE, POINTS, QUESTIONS, RATIO, SHARE
from kvbench.metrics.declare.value import Value, incomparable, share, unmeasured
from kvbench.records.record import Record
from kvbench.stats import intervals as stats
from kvbench.stats.intervals import Interval
from kvbench.stats.p_values import mcnemar_p

COMPARABLE = ("task", "shots", "choice_ids", "prompt_policy", "bos", "total", "data_sha")

LEAST_AGAIN = 8  # questions scored twice; fewer say nothing about the noise of the others
NOT_AGAIN = "the baseline was not scored a second time (option aa_limit)"
NO_NUMBER = "a question has a choice without a number"

# Of a candidate and its baseline, question by question.
PAIRED = (
    "mcq_delta_pt", "mcq_mde_pt", "mcq_recovery", "mcq_agreement", "mcq_right_to_wrong", "mcq_wrong_to_right",
    "mcq_wrong_to_wrong", "mcq_mcnemar_p", "mcq_real_flips",
)  # fmt: skip


class Judged(NamedTuple):
    """One scored question under one norm. scores: summed logprobs; picks: the choices with the highest score
    (several: a tie), empty where a choice has no number, which makes shares NaN."""

    subject: str
    answer: int
    picks: list[int]
    scores: Sequence[float]

    @property
    def right(self) -> bool:
        """Whether the first pick is the answer."""
        return self.picks[:1] == [self.answer]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    questions = record.samples["questions"]
    judged = judge(record)
    scored = list(judged.values())
    yield Value("mcq_scored", len(scored), len(questions))
    yield share("truncated_share", sum(bool(q["truncated"]) for q in questions), len(questions))
    skipped, ties = len(questions) - len(scored), sum(len(j.picks) > 1 for j in scored)
    note = f"{len(scored)} of {len(questions)} scored, {skipped} skipped, {ties} tied"
    yield _accuracy("mcq_accuracy", scored, note)
    yield _accuracy("mcq_accuracy_norm", list(judge(record, "tokens").values()), "per token")
    yield _accuracy("mcq_accuracy_norm_char", list(judge(record, "chars").values()), "per character")
    yield _macro(scored)
    yield from _noise(baseline or record)  # the baseline's own noise is shown with its candidates too
    if baseline:
        note = incomparable(record, baseline, COMPARABLE)
        yield from _paired(judged, judge(baseline), *score_noise(baseline), note)


def _noise(native: Record) -> Iterator[Value]:
    """How far the baseline's own picks and scores move when it is scored again, or behind a line end."""
    for metric, key in (("mcq_aa_disagreement", "aa_scores"), ("mcq_prefix_disagreement", "prefix_scores")):
        asked = [q for q in native.samples["questions"] if key in q]
        picks = [[best_choices(q[k], [1] * len(q[k])) for k in ("scores", key)] for q in asked]
        if not asked:
            reason = native.facts.get("prefix") if key == "prefix_scores" else None
            yield Value(metric, None, note=reason or NOT_AGAIN)
        elif all(first and second for first, second in picks):
            yield share(metric, sum(first[0] != second[0] for first, second in picks), len(picks))
        else:
            yield Value(metric, math.nan, len(picks), note=NO_NUMBER)
    noise, why = score_noise(native)
    again = sum("aa_scores" in q for q in native.samples["questions"])
    yield Value("mcq_aa_score_noise", noise, again, note=why)


def score_noise(native: Record) -> tuple[float | None, str]:
    """The largest change of a choice's summed logprob between the baseline's two runs, and ""; or None and
    the reason: fewer than `LEAST_AGAIN` questions, or a choice that moved by more than rounding explains,
    which would hide every flip. A token's logprob moves by no more than its gaps do, `NEAR_TIE`."""
    again = [q for q in native.samples["questions"] if "aa_scores" in q]
    if not again:
        return None, NOT_AGAIN
    moved = [
        (abs(a - b), tokens, q["id"])
        for q in again
        for a, b, tokens in zip(q["scores"], q["aa_scores"], q["tokens"], strict=True)
    ]
    dtype = native.spec["dtype"]
    bound = NEAR_TIE[dtype]
    wild = [one for one in moved if math.isfinite(one[0]) and one[0] > one[1] * bound]
    if wild:
        most, tokens, key = max(wild, key=lambda one: one[0])
        return None, (
            f"a choice of question {key} moved by {most:.3g} nat between the baseline's two runs; "
            f"rounding in {dtype} explains {tokens * bound:g} ({tokens} token{'s' if tokens > 1 else ''}). "
            "It is no noise floor, so no flip is called real or a near-tie"
        )
    worst = stats.largest(each for each, _, _ in moved)
    if math.isfinite(worst) and len(again) < LEAST_AGAIN:
        many = f"{len(again)} question{'s were' if len(again) > 1 else ' was'}"
        return None, f"{many} scored a second time, a noise floor needs {LEAST_AGAIN} (option aa_limit)"
    return worst, ""


def _real_flips(pairs: Sequence[tuple[Judged, Judged]], noise: float | None, why: str) -> Value:
    """Changed picks that noise does not explain, which may lower one choice and raise the other."""
    if noise is None:
        return Value("mcq_real_flips", None, len(pairs), note=why)
    margins = [b.scores[b.picks[0]] - b.scores[a.picks[0]] for a, b in pairs if a.picks[0] != b.picks[0]]
    real = sum(margin > 2 * noise for margin in margins)
    note = f"{len(margins) - real} of {len(margins)} changed picks are near-ties" if margins else ""
    return share("mcq_real_flips", real, len(pairs), note)


def judge(record: Record, norm: str | None = None) -> dict[Any, Judged]:
    """The scored questions by id, judged by summed logprob, or by logprob over the lengths named `norm`."""
    found = {}
    for q in record.samples["questions"]:
        if q["skipped"] is None:
            picks = best_choices(q["scores"], q[norm] if norm else [1] * len(q["scores"]))
            found[q["id"]] = Judged(q["subject"], q["answer"], picks, q["scores"])
    return found


def best_choices(scores: Sequence[float], lengths: Sequence[int]) -> list[int]:
    """The choices with the highest score over length: several in a tie, none where one has no number."""
    normed = [score / n if n else math.nan for score, n in zip(scores, lengths, strict=True)]
    if any(map(math.isnan, normed)):
        return []
    best = max(normed)
    return [i for i, score in enumerate(normed) if score == best]


def _accuracy(name: str, judged: Sequence[Judged], note: str) -> Value:
    if broken := sum(not j.picks for j in judged):
        note = f"{broken} of {len(judged)} questions have a choice without a number"
        return Value(name, math.nan, len(judged), note=note)
    return share(name, sum(j.right for j in judged), len(judged), note)


def _macro(judged: Sequence[Judged]) -> Value:
    subjects: dict[str, list[bool]] = defaultdict(list)
    for j in judged:
        subjects[j.subject].append(j.right)
    if not subjects:
        return Value("mcq_macro", None, 0, note="nothing was scored")
    means = [fmean(outcomes) for outcomes in subjects.values()]
    found = stats.clustered_ratio(means, [1.0] * len(means), range(len(means)))
    note = f"{len(subjects)} subjects" if found.interval else "1 subject: no interval"
    if not all(j.picks for j in judged):
        return Value("mcq_macro", math.nan, len(judged), note=note)
    low, high = found.interval or (None, None)
    if low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return Value("mcq_macro", found.value, len(judged), low, high, note, found.effective)


def _paired(
    own: Mapping[Any, Judged], native: Mapping[Any, Judged], noise: float | None, why: str, note: str
) -> Iterator[Value]:
    """Over the questions that both scored. noise, why: `score_noise`; note: why they are not comparable."""
    pairs = [(judged, native[key]) for key, judged in own.items() if key in native]
    n = len(pairs)
    if not note and any(a.answer != b.answer for a, b in pairs):
        note = "not comparable with the baseline: a question has another answer there"
    if not note and not n:
        note = "no question was scored on both sides"
    if note:
        yield from unmeasured(PAIRED, note, n)
        return
    if not all(a.picks and b.picks for a, b in pairs):
        yield from (Value(name, math.nan, n, note=NO_NUMBER) for name in PAIRED)
        return
    gained = sum(a.right and not b.right for a, b in pairs)
    lost = sum(b.right and not a.right for a, b in pairs)
    low, high = interval = stats.paired_difference(gained, lost, n)
    note = (
        f"{gained} gained, {lost} lost of {n} paired; not worse by more than {max(0.0, -100 * low):.2g} pt, "
        f"equivalent within {100 * stats.equivalence_margin(interval):.2g} pt (one-sided tests at 2.5%)"
    )
    yield Value("mcq_delta_pt", 100 * (gained - lost) / n, n, 100 * low, 100 * high, note)
    detectable = 100 * stats.detectable_difference(gained, lost, n)
    yield Value("mcq_mde_pt", detectable, n, note=f"{gained + lost} of {n} pairs discordant; at 80% power")
    yield _recovery(sum(b.right for _, b in pairs), (gained - lost) / n, interval, n)
    yield _real_flips(pairs, noise, why)
    yield share("mcq_agreement", sum(a.picks[0] == b.picks[0] for a, b in pairs), n)
    yield share("mcq_right_to_wrong", lost, n)
    yield share("mcq_wrong_to_right", gained, n)
    moved = sum(a.picks[0] != b.picks[0] and not a.right and not b.right for a, b in pairs)
    yield share("mcq_wrong_to_wrong", moved, n)
    yield Value("mcq_mcnemar_p", mcnemar_p(gained, lost), n, note=f"{gained} gained, {lost} lost")


def _recovery(native_right: int, change: float, interval: Interval, n: int) -> Value:
    """1 plus the paired difference over the baseline's accuracy, which is taken as measured."""
    if not native_right:
        return Value("mcq_recovery", None, n, note="the baseline answers no question")
    native = native_right / n
    low, high = (max(0.0, 1 + end / native) for end in interval)
    return Value("mcq_recovery", max(0.0, 1 + change / native), n, low, high, f"of {native:.4g}")


def _accuracy_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable:
    common = _common(first.record, second.record)
    if isinstance(common, str):
        return Unable(metric.name, common)
    _, a, b, subset = common
    identical = [j.scores for j in a] == [j.scores for j in b]
    return _questions_change(metric, [j.right for j in a], [j.right for j in b], subset, identical)


def _agreement_change(metric: Metric, first: Measured, second: Measured) -> Effect | None:
    common = _common(first.record, second.record)
    natives = [judge(side.native) for side in (first, second) if side.native]
    if isinstance(common, str) or len(natives) < 2:
        return None
    keys, a, b, subset = common
    if not all(key in native and native[key].picks for key in keys for native in natives):
        return None
    flags = [
        [j.picks[0] == native[key].picks[0] for key, j in zip(keys, judged, strict=True)]
        for judged, native in zip((a, b), natives, strict=True)
    ]
    identical = [j.scores for j in a] == [j.scores for j in b]
    identical = identical and all(natives[0][key].scores == natives[1][key].scores for key in keys)
    return _questions_change(metric, flags[0], flags[1], subset, identical)


def _common(first: Record, second: Record) -> tuple[list[Any], list[Judged], list[Judged], str] | str:
    """Ids and judgements of the questions that both runs scored, and which those are; or why not."""
    sides = [judge(record) for record in (first, second)]
    keys = [key for key in sides[0] if key in sides[1]]
    a, b = ([side[key] for key in keys] for side in sides)
    if not keys:
        return "the two runs scored no question in common"
    if any(x.answer != y.answer for x, y in zip(a, b, strict=True)):
        return "a question has another answer in the other run"
    if not all(j.picks for j in (*a, *b)):
        return NO_NUMBER
    most = max(map(len, sides))
    return keys, a, b, f"{len(keys)} questions that both scored, of {most}" if len(keys) < most else ""


def _questions_change(
    metric: Metric, own: Sequence[bool], other: Sequence[bool], subset: str, identical: bool
) -> Effect:
    differences = [int(b) - int(a) for a, b in zip(own, other, strict=True)]
    p = mcnemar_p(differences.count(1), differences.count(-1))
    more = {"subset": subset, "identical": identical}
    found = share_change(metric, differences, [1] * len(own), range(len(own)), **more)
    return replace(found, method=f"{found.method}, exact McNemar p = {p:.2g}")


FACTS: tuple[str, ...] = COMPARABLE
_DELTA: dict[str, Any] = {"paired": True, "sampled": True, "none": 0.0}
TABLES: tuple[Table, ...] = (
    Table("mcq", "Multiple choice", counted="questions",
          note="Choices are scored by summed logprob; the delta is paired with the baseline question by "
               "question; shares have Wilson intervals. A delta smaller than the detectable one can exist "
               "unseen. The noise floor is native scored again; 'line end before': native's picks that "
               "change behind a line end. Flips beyond noise are not explained by the noise floor.",
          metrics=(
        Metric("mcq_accuracy", SHARE, "higher", "Accuracy",
               "share of scored questions where the (first) choice with the highest summed logprob is the "
               "answer; Wilson interval", sampled=True, brief=True, effect=_accuracy_change),
        Metric("mcq_delta_pt", POINTS, "", "Accuracy delta",
               "accuracy less the baseline's on the questions both scored, in points; Bonett-Price "
               "interval on the discordant pairs", brief=True, **_DELTA),
        Metric("mcq_mde_pt", POINTS, "lower", "Detectable at 80% power",
               "the smallest true change of accuracy that the interval of mcq_delta_pt detects with 80% "
               "power at this number of discordant pairs", plausible=(0.0, inf), paired=True, brief=True),
        Metric("mcq_recovery", RATIO, "higher", "Accuracy to native",
               "accuracy over the baseline's on the questions both scored: 1 plus mcq_delta_pt and its "
               "interval over the baseline's accuracy", paired=True, sampled=True, none=1.0),
        Metric("mcq_agreement", SHARE, "higher", "Same pick",
               "share of the questions both scored where both pick the same choice; Wilson interval",
               paired=True, sampled=True, none=1.0, brief=True, effect=_agreement_change),
        Metric("mcq_right_to_wrong", SHARE, "lower", "Right to wrong",
               "share of these that the baseline answers correctly and the candidate does not", **_DELTA),
        Metric("mcq_wrong_to_right", SHARE, "", "Wrong to right",
               "share of these that the candidate answers correctly and the baseline does not", **_DELTA),
        Metric("mcq_wrong_to_wrong", SHARE, "lower", "Wrong to another wrong",
               "share of these that neither answers correctly and whose choice changed", **_DELTA),
        Metric("mcq_real_flips", SHARE, "lower", "Flips beyond noise",
               "share of the questions both scored where the candidate picks a choice that the baseline "
               "scores below its own by over twice mcq_aa_score_noise", brief=True, **_DELTA),
        Metric("mcq_aa_disagreement", SHARE, "lower", "A/A noise floor",
               "share of a spread subset of the questions (option aa_limit) whose pick changes when the "
               "baseline scores them again in other chunks", sampled=True, none=0.0, brief=True),
        Metric("mcq_aa_score_noise", NAT, "lower", "A/A score noise",
               "largest change of a choice's summed logprob between these two runs of the baseline; no "
               "value from fewer than 8 questions or if rounding does not explain it", plausible=(0.0, inf)),
        Metric("mcq_prefix_disagreement", SHARE, "lower", "Line end before",
               "share of these whose pick changes when a line end is put before the prompt", sampled=True),
        Metric("mcq_mcnemar_p", P_VALUE, "", "McNemar p",
               "exact McNemar test of equal accuracy on the questions both scored", paired=True),
        Metric("mcq_macro", SHARE, "higher", "Macro average",
               "mean over subjects of their accuracy; t-interval over subjects", sampled=True),
        Metric("mcq_accuracy_norm", SHARE, "higher", "Accuracy by token",
               "mcq_accuracy with logprob per token", sampled=True),
        Metric("mcq_accuracy_norm_char", SHARE, "higher", "Accuracy by character",
               "mcq_accuracy with logprob per character", sampled=True),
        Metric("mcq_scored", QUESTIONS, "higher", "Scored", "questions scored; n: those asked", brief=True),
        Metric("truncated_share", SHARE, "lower", "Truncated", "share of questions with a truncated prompt"),
    )),
)  # fmt: skip
