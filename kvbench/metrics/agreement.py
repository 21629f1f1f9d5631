"""Greedy tokens compared with the baseline's, along the native history (teacher-forced) and along the cell's own
(free-running): first divergence, its margin, the noise floor, length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvbench.metrics.generate import distinct_ngrams
from kvbench.metrics.value import Value, incomparable, share_of_steps
from kvbench.records.record import Record
from kvbench.stats.intervals import largest

# Below this share of different 4-grams a text is mostly repetition (plain prose of this length has above 0.9).
LOOPS = 0.5

# By dtype. Two ways to compute the same logits differ by rounding and summation order, and a K/V that differs in its last bit may
# be stored as the neighbouring code. A gap of two logits that moves by less than this moves by rounding, by more it is a fault
# of the engine. Logits of text models are of the order of 20.
NEAR_TIE = {"float32": 0.05, "float16": 0.2, "bfloat16": 0.5}

COMPARABLE = ("steps", "prompt_tokens", "prompt_sha")


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    noise = baseline or record  # the baseline's own A/A noise, beside its candidates too
    again = noise.facts.get("aa_disagreements")
    steps = len(noise.samples["tokens"])
    if again is not None and steps:
        flips = set(again)
        yield share_of_steps("aa_disagreement", [i in flips for i in range(steps)])
    yield _prefixed(noise)
    floor, why = margin_noise(noise)
    if floor is not None or why:
        yield Value("aa_margin_noise", floor, steps, note=why)
    distinct = distinct_ngrams(noise.samples["tokens"], 4)
    if distinct is not None:
        loops = (
            "the native text repeats itself: agreement on it counts few choices" if distinct < LOOPS else ""
        )
        yield Value("native_distinct_4grams", distinct, steps, note=loops)
    if baseline:
        yield from _against(record, baseline)


def _prefixed(native: Record) -> Value:
    """How much of the baseline's text a line end before the prompt would have changed, step by step along its own history."""
    behind, tokens = native.samples.get("prefix_tokens"), native.samples["tokens"]
    if not behind:
        reason = native.facts.get("prefix", "the record has no such pass")
        return Value("prefix_disagreement", None, note=reason)
    return share_of_steps("prefix_disagreement", [a != b for a, b in zip(behind, tokens, strict=True)])


def margin_noise(native: Record) -> tuple[float | None, str]:
    """The most that a step's top-2 margin moved between the baseline's two runs, and ""; or None and the reason.

    Where the argmax flipped, the margin went through zero: both sides of it count. None and "" where the record has no second
    run; None with a reason where a margin moved by more than `NEAR_TIE`: as a floor it would hide every divergence below it.
    """
    margins, again = native.samples["margins"], native.samples.get("aa_margins")
    if not again:
        return None, ""
    flipped = set(native.facts.get("aa_disagreements") or ())
    moved = [
        a + b if i in flipped else abs(a - b) for i, (a, b) in enumerate(zip(margins, again, strict=True))
    ]
    most, bound = largest(moved), NEAR_TIE[native.spec["dtype"]]
    if math.isfinite(most) and most > bound:
        return None, (
            f"the native margin of step {moved.index(most)} moved by {most:.3g} logit between two runs, in {native.spec['dtype']} "
            f"rounding explains {bound:g}: no noise, so no divergence is called real or a near-tie"
        )
    return most, ""


def _against(record: Record, baseline: Record) -> Iterator[Value]:
    """Both ran on the native history, so the first step that differs is where free running diverges."""
    tokens, native = record.samples["tokens"], baseline.samples["tokens"]
    note = incomparable(record, baseline, COMPARABLE)
    if not note and len(tokens) != len(native):
        note = f"not comparable with the baseline: {len(tokens)} steps here, {len(native)} there"
    if note:
        for name in (
            "top1_teacher_forced",
            "first_divergence",
            "real_divergence",
            "divergence_margin",
            "length_ratio",
        ):
            yield Value(name, None, note=note)
        return
    steps = len(tokens)
    differing = [i for i, (a, b) in enumerate(zip(tokens, native, strict=True)) if a != b]
    margins = baseline.samples["margins"]
    floor, why = margin_noise(baseline)
    flipped = set(baseline.facts.get("aa_disagreements") or ())
    ties = {i for i in differing if i in flipped or (floor is not None and margins[i] <= floor)}
    real = [i for i in differing if i not in ties]
    yield share_of_steps("top1_teacher_forced", [a == b for a, b in zip(tokens, native, strict=True)])
    yield from _length(record, baseline)
    of = f"{len(ties)} of {len(differing)} differing steps are near-ties" if differing else ""
    unseen = f"censored: no divergence within {steps} steps"
    if why:
        yield Value("real_divergence", None, steps, note=why)
    else:
        note = of if real else "; ".join(filter(None, (unseen, of)))
        yield Value("real_divergence", real[0] if real else steps, steps, note=note)
    if not differing:
        yield Value("first_divergence", steps, steps, note=unseen)
        yield Value("divergence_margin", None, steps, note=unseen)
        return
    first = differing[0]
    note = ""
    if first in flipped:
        note = "the baseline disagrees with itself there: a near-tie, no real divergence"
    elif first in ties:
        note = f"the native margin there is within the A/A noise ({floor:.3g} logit): a near-tie, no real divergence"
    yield Value("first_divergence", first, steps, note=note)
    yield Value("divergence_margin", margins[first], steps, note=note)


def _length(record: Record, baseline: Record) -> Iterator[Value]:
    """Tokens up to the first one that ends a text, along the native history; a text that goes on counts with all its steps."""
    ends = set(baseline.facts.get("end_ids") or ())
    if not ends:
        yield Value("length_ratio", None, note="no token is known that ends a text")
        return
    own, native = (_until(r.samples["tokens"], ends) for r in (record, baseline))
    steps = len(record.samples["tokens"])
    note = (
        f"{own} tokens to {native}" if min(own, native) < steps else f"neither text ends within {steps} steps"
    )
    yield Value("length_ratio", own / native, 1, note=note)


def _until(tokens: Sequence[int], ends: set[int]) -> int:
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
