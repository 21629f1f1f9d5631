"""Greedy tokens compared with the baseline's along the native history: divergences, noise floor, length."""

import math
from collections.abc import Iterator, Sequence

from kvbench.metrics.declare.change import steps_change
from kvbench.metrics.declare.metric import Effect, Measured, Metric, Table, Unable
from kvbench.metrics.declare.units import LOGIT, RATIO, SHARE, STEP
from kvbench.metrics.declare.value import Value, incomparable, joined, share_of_steps, unmeasured
from kvbench.metrics.generate import distinct_ngrams
from kvbench.records.record import Record
from kvbench.stats.intervals import largest

# Below this share of different 4-grams a text is mostly repetition; plain prose of this length has above 0.9.
LOOPS = 0.5
# By dtype: how far summation order and neighbouring codes can move the gap of two logits, which are about 20.
NEAR_TIE = {"float32": 0.05, "float16": 0.2, "bfloat16": 0.5}

COMPARABLE = ("steps", "prompt_tokens", "prompt_sha")
PAIRED = ("top1_teacher_forced", "first_divergence", "real_divergence", "divergence_margin", "length_ratio")


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    native = baseline or record  # the baseline's own A/A noise is shown with its candidates too
    again, steps = native.facts.get("aa_disagreements"), len(native.samples["tokens"])
    if again is not None and steps:
        flips = set(again)
        yield share_of_steps("aa_disagreement", [i in flips for i in range(steps)])
    yield _prefixed(native)
    floor, why = margin_noise(native)
    if floor is not None or why:
        yield Value("aa_margin_noise", floor, steps, note=why)
    distinct = distinct_ngrams(native.samples["tokens"], 4)
    if distinct is not None:
        loops = "the native text repeats itself: agreement on it tests few choices"
        yield Value("native_distinct_4grams", distinct, steps, note=loops if distinct < LOOPS else "")
    if baseline:
        yield from _against(record, baseline)


def _prefixed(native: Record) -> Value:
    """How many steps of the baseline's text change behind a line end before the prompt."""
    behind, tokens = native.samples.get("prefix_tokens"), native.samples["tokens"]
    if not behind:
        reason = native.facts.get("prefix", "the record has no such pass")
        return Value("prefix_disagreement", None, note=reason)
    return share_of_steps("prefix_disagreement", [a != b for a, b in zip(behind, tokens, strict=True)])


def margin_noise(native: Record) -> tuple[float | None, str]:
    """The largest change of a step's top-2 margin between the baseline's two runs, and ""; or None and why.

    Where the argmax flipped, the margin went through zero: both sides count. None and "" where the record has
    no second run; None with a reason where a margin moved by more than `NEAR_TIE`, which would hide every
    divergence below it."""
    margins, again = native.samples["margins"], native.samples.get("aa_margins")
    if not again:
        return None, ""
    flipped = set(native.facts.get("aa_disagreements") or ())
    pairs = enumerate(zip(margins, again, strict=True))
    moved = [a + b if i in flipped else abs(a - b) for i, (a, b) in pairs]
    most, dtype = largest(moved), native.spec["dtype"]
    if math.isfinite(most) and most > NEAR_TIE[dtype]:
        return None, (
            f"the native margin of step {moved.index(most)} moved by {most:.3g} logit between two runs; "
            f"rounding in {dtype} explains {NEAR_TIE[dtype]:g}. It is no noise floor, so no divergence is "
            "called real or a near-tie"
        )
    return most, ""


def _against(record: Record, baseline: Record) -> Iterator[Value]:
    """Both ran on the native history, so the first step that differs is where free running diverges."""
    tokens, native = record.samples["tokens"], baseline.samples["tokens"]
    note = incomparable(record, baseline, COMPARABLE)
    if not note and len(tokens) != len(native):
        note = f"not comparable with the baseline: {len(tokens)} steps here, {len(native)} there"
    if note:
        yield from unmeasured(PAIRED, note)
        return
    steps, margins = len(tokens), baseline.samples["margins"]
    differing = [i for i, (a, b) in enumerate(zip(tokens, native, strict=True)) if a != b]
    floor, why = margin_noise(baseline)
    flipped = set(baseline.facts.get("aa_disagreements") or ())
    ties = {i for i in differing if i in flipped or (floor is not None and margins[i] <= floor)}
    real = [i for i in differing if i not in ties]
    yield share_of_steps("top1_teacher_forced", [a == b for a, b in zip(tokens, native, strict=True)])
    yield _length(record, baseline)
    of = f"{len(ties)} of {len(differing)} differing steps are near-ties" if differing else ""
    unseen = f"censored: no divergence within {steps} steps"
    if why:
        yield Value("real_divergence", None, steps, note=why)
    else:
        note = of if real else joined(unseen, of)
        yield Value("real_divergence", real[0] if real else steps, steps, note=note)
    if not differing:
        yield Value("first_divergence", steps, steps, note=unseen)
        yield Value("divergence_margin", None, steps, note=unseen)
        return
    first, note = differing[0], ""
    if first in flipped:
        note = "near-tie: the baseline disagrees with itself at this step"
    elif first in ties:
        note = f"near-tie: the native margin at this step is within the A/A noise ({floor:.3g} logit)"
    yield Value("first_divergence", first, steps, note=note)
    yield Value("divergence_margin", margins[first], steps, note=note)


def _length(record: Record, baseline: Record) -> Value:
    ends = set(baseline.facts.get("end_ids") or ())
    if not ends:
        return Value("length_ratio", None, note="the tokenizer has no end-of-text token")
    own, native = (_until(r.samples["tokens"], ends) for r in (record, baseline))
    steps = len(record.samples["tokens"])
    neither = f"neither text ends within {steps} steps"
    note = f"{own} tokens to {native}" if min(own, native) < steps else neither
    return Value("length_ratio", own / native, 1, note=note)


def _until(tokens: Sequence[int], ends: set[int]) -> int:
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


def _step_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable | None:
    """Both runs followed their own native text: steps are pairs as long as the two native texts are equal."""
    if not first.native or not second.native:
        return None  # a baseline agrees with itself
    natives = [native.samples["tokens"] for native in (first.native, second.native)]
    own, other = first.record.samples["tokens"], second.record.samples["tokens"]
    steps = min(map(len, (*natives, own, other)))
    shared = next((i for i in range(steps) if natives[0][i] != natives[1][i]), steps)
    if not shared:
        return Unable(metric.name, "the native texts differ at the first step")
    flags = [[x == y for x, y in zip(tokens[:shared], natives[0], strict=False)] for tokens in (own, other)]
    subset = f"{shared} of {steps} steps, before the native texts differ" if shared < steps else ""
    scores = [side.record.samples.get("logprob_native_token") for side in (first, second)]
    identical = own == other and natives[0] == natives[1] and bool(scores[0]) and scores[0] == scores[1]
    return steps_change(metric, flags[0], flags[1], subset=subset, identical=identical)


FACTS: tuple[str, ...] = COMPARABLE
TABLES: tuple[Table, ...] = (
    Table("agreement", "Token agreement", counted="steps",
          note="Teacher-forced: the share of steps on which the candidate picks the native token along the "
               "native history. Steps count from 0. A divergence whose native margin is within the A/A "
               "noise is a near-tie; 'beyond near-ties' is the first other one. 'Line end before': the "
               "share of native's own steps that change behind a line end, as a scale.",
          metrics=(
        Metric("top1_teacher_forced", SHARE, "higher", "Teacher-forced top-1",
               "share of steps with the native argmax when fed the native history; interval clustered by "
               "blocks of 64 steps", paired=True, sampled=True, none=1.0, brief=True, effect=_step_change),
        Metric("first_divergence", STEP, "higher", "First divergence",
               "first token of the free-running text that differs; right-censored", paired=True, brief=True),
        Metric("divergence_margin", LOGIT, "lower", "Native margin there",
               "native top-2 logit margin at the first divergence; below the A/A noise a near-tie",
               paired=True),
        Metric("real_divergence", STEP, "higher", "Beyond near-ties",
               "first token that differs where the native margin is above aa_margin_noise and the baseline "
               "agrees with itself, along the native history; right-censored", paired=True, brief=True),
        Metric("aa_disagreement", SHARE, "lower", "A/A noise floor",
               "share of steps on which the baseline, measured again in other chunks, disagrees with itself; "
               "interval clustered by blocks of 64 steps", sampled=True, none=0.0, brief=True),
        Metric("aa_margin_noise", LOGIT, "lower", "A/A margin noise",
               "largest change of a step's top-2 logit margin between these two runs of the baseline; no "
               "value if rounding does not explain it"),
        Metric("prefix_disagreement", SHARE, "lower", "Line end before",
               "share of steps of the baseline's own text whose argmax changes when a line end is put "
               "before the prompt; interval clustered by blocks of 64 steps", sampled=True, brief=True),
        Metric("length_ratio", RATIO, "", "Length to native",
               "tokens up to the first end-of-text token over the baseline's, along the native history; a "
               "text that does not end counts all its steps", paired=True),
        Metric("native_distinct_4grams", SHARE, "higher", "Native text, distinct 4-grams",
               "share of distinct 4-grams in the baseline's text; one that loops tests little", brief=True),
    )),
)  # fmt: skip
