"""Greedy tokens against the baseline's: teacher-forced share, first free-running divergence and its margin."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.derive.repetition import distinct_ngrams
from kvbench.derive.value import Value, incomparable, share
from kvbench.record import Record

# Below this share of different 4-grams a text is mostly repetition (plain prose of this length has above 0.9).
LOOPS = 0.5

COMPARABLE = ("steps", "prompt_tokens", "prompt_sha")


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    noise = baseline or record  # the baseline's own A/A noise, beside its candidates too
    again = noise.facts.get("aa_disagreements")
    steps = len(noise.samples["tokens"])
    if again is not None and steps:
        yield share("aa_disagreement", len(again), steps)
    distinct = distinct_ngrams(noise.samples["tokens"], 4)
    if distinct is not None:
        loops = (
            "the native text repeats itself: agreement on it counts few choices" if distinct < LOOPS else ""
        )
        yield Value("native_distinct_4grams", distinct, steps, note=loops)
    if baseline:
        yield from _against(record, baseline)


def _against(record: Record, baseline: Record) -> Iterator[Value]:
    """Both ran on the native history, so the first step that differs is where free running diverges."""
    tokens, native = record.samples["tokens"], baseline.samples["tokens"]
    note = incomparable(record, baseline, COMPARABLE)
    if not note and len(tokens) != len(native):
        note = f"not comparable with the baseline: {len(tokens)} steps here, {len(native)} there"
    if note:
        for name in ("top1_teacher_forced", "first_divergence", "divergence_margin"):
            yield Value(name, None, note=note)
        return
    steps = len(tokens)
    differing = [i for i, (a, b) in enumerate(zip(tokens, native, strict=True)) if a != b]
    yield share("top1_teacher_forced", steps - len(differing), steps)
    if not differing:
        censored = f"censored: no divergence within {steps} steps"
        yield Value("first_divergence", steps, steps, note=censored)
        yield Value("divergence_margin", None, steps, note=censored)
        return
    first = differing[0]
    margin = baseline.samples["margins"][first]
    near_tie = first in (baseline.facts.get("aa_disagreements") or ())
    note = "the baseline disagrees with itself there: a near-tie, no real divergence" if near_tie else ""
    yield Value("first_divergence", first, steps, note=note)
    yield Value("divergence_margin", margin, steps, note=note)
