"""Repetition of n-grams in the cell's own greedy text: where it repeats itself, ends, or leaves native's.

A small model repeats itself natively too, so a collapse is what the candidate does and native does not,
prompt by prompt. Texts that diverge at a near-tie often start to loop at tokens that differ by a factor of
two, but not by four. Prompts where native ends at once are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import SHARE, STEP, TOKENS
from kvbench.metrics.declare.value import Value, incomparable, share, unmeasured
from kvbench.records.record import Record

COMPARABLE = ("prompts", "new_tokens", "prompt_sha", "eos_tokens")
EARLY = 0.25  # a text that is over before this share of native's has collapsed

Tokens = Sequence[int]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    texts, steps = texts_of(record), record.facts["new_tokens"]
    onsets = [degeneration_onset(text) for text in texts]
    loops = [longest_loop(text) for text in texts]
    distinct = [d for text in texts if (d := distinct_ngrams(text, 4)) is not None]
    if distinct:
        yield Value("gen_distinct_4grams", fmean(distinct), len(texts), note=f"lowest: {min(distinct):.3g}")
    note = "; ".join(f"period {loop.period}, {loop.length} tokens" if loop else "none" for loop in loops)
    yield Value("gen_loop_tokens", max(loop.length if loop else 0 for loop in loops), len(texts), note=note)
    yield _censored("gen_loop_onset", [loop.onset if loop else None for loop in loops], steps)
    yield _censored("gen_eos", record.samples["eos"], steps)
    yield share("gen_degenerated", sum(onset is not None for onset in onsets), len(texts))
    yield _censored("gen_onset", onsets, steps)
    yield _censored("gen_useful_tokens", useful_tokens(record), steps)
    if baseline:
        yield from _against(record, baseline, texts, onsets, steps)


def texts_of(record: Record) -> list[Tokens]:
    """The generated tokens of each prompt, up to the first end-of-text token."""
    ends = record.samples["eos"]
    return [
        text if end is None else text[:end] for text, end in zip(record.samples["tokens"], ends, strict=True)
    ]


def useful_tokens(record: Record) -> list[int | None]:
    """For each prompt, the tokens before its text only repeats itself or ends; None where it does neither."""
    ends = zip(map(degeneration_onset, texts_of(record)), record.samples["eos"], strict=True)
    return [min((at for at in pair if at is not None), default=None) for pair in ends]


def _against(
    record: Record, baseline: Record, texts: Sequence[Tokens], onsets: Sequence[int | None], steps: int
) -> Iterator[Value]:
    names = ("gen_first_divergence", "gen_native_degenerated", "gen_native_onset", "gen_collapsed")
    if note := incomparable(record, baseline, COMPARABLE):
        yield from unmeasured(names, note)
        return
    native = texts_of(baseline)
    own = [degeneration_onset(text) for text in native]
    apart = [first_divergence(a, b) for a, b in zip(texts, native, strict=True)]
    yield _censored("gen_first_divergence", apart, steps)
    yield share("gen_native_degenerated", sum(onset is not None for onset in own), len(own))
    yield _censored("gen_native_onset", own, steps)
    useful = [steps if at is None else at for at in useful_tokens(baseline)]
    pairs = zip(onsets, record.samples["eos"], own, useful, strict=True)
    fallen = [collapsed(onset, end, by, tokens, steps) for onset, end, by, tokens in pairs if tokens]
    silent = len(useful) - len(fallen)
    note = f"{silent} more, where native ends at once" if silent else ""
    note = note if fallen else "native's own texts end at once"
    yield share("gen_collapsed", sum(fallen), len(fallen), note)


def collapsed(
    onset: int | None, end: int | None, native_onset: int | None, native_useful: int, steps: int
) -> bool:
    """Whether a text repeats itself or ends before `EARLY` of native's onset or useful tokens."""
    repeats = onset is not None and onset < EARLY * (steps if native_onset is None else native_onset)
    return repeats or (end is not None and end < EARLY * native_useful)


def _censored(metric: str, found: Sequence[int | None], steps: int) -> Value:
    """The lower median over the prompts, an observed value; the number of steps replaces None."""
    each = ", ".join("none" if at is None else str(at) for at in found)
    return Value(metric, median_low(steps if at is None else at for at in found), steps, note=f"each: {each}")


LONGEST_PERIOD = 128
COPIES = 3  # a unit that occurs twice can be a figure of speech
SHORTEST = 12  # tokens of a loop: `. . .` and a table's rule are shorter

GRAM = 4
STALE = 0.9  # share of repeated tokens from which the end of a text is only repetition
SHORTEST_TAIL = 32


@dataclass(frozen=True)
class Loop:
    """tokens[onset : onset + length] is one unit of `period` tokens, repeated."""

    onset: int
    period: int
    length: int


def distinct_ngrams(tokens: Sequence[int], n: int) -> float | None:
    """Distinct n-grams over all n-grams; None for a text shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def longest_loop(tokens: Sequence[int]) -> Loop | None:
    """The loop with the most tokens (of equal ones the smallest period, then the earliest), of at least
    `COPIES` copies and `SHORTEST` tokens. The last copy may be cut off."""
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // COPIES) + 1):
        start = period
        for i in range(period, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - period]:
                continue
            length = i - start + period
            long_enough = length >= max(COPIES * period, SHORTEST)
            if long_enough and (best is None or length > best.length):
                best = Loop(start - period, period, length)
            start = i + 1
    return best


def degeneration_onset(tokens: Sequence[int]) -> int | None:
    """The token from which the text only repeats itself to its end; None where it does not.

    A token is repeated when the `GRAM` tokens that end with it occurred earlier. The onset is the earliest
    repeated token from which at least `STALE` of the `SHORTEST_TAIL` or more tokens to the end are repeated.
    """
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(tokens)
    for i in range(GRAM - 1, len(tokens)):
        gram = tuple(tokens[i - GRAM + 1 : i + 1])
        repeated[i] = gram in seen
        seen.add(gram)
    onset, count = None, 0
    for i in range(len(tokens) - 1, -1, -1):
        count += repeated[i]
        tail = len(tokens) - i
        if repeated[i] and tail >= SHORTEST_TAIL and count >= STALE * tail:
            onset = i
    return onset


def first_divergence(tokens: Sequence[int], native: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing in one text; None where they are equal."""
    for i, (a, b) in enumerate(zip(tokens, native, strict=False)):
        if a != b:
            return i
    return None if len(tokens) == len(native) else min(len(tokens), len(native))


FACTS: tuple[str, ...] = COMPARABLE
TABLES: tuple[Table, ...] = (
    Table("generate", "Free-running text", counted="texts",
          note="Each cell writes its own greedy text. Useful tokens come before the text only repeats "
               "itself or ends. A small model repeats itself natively too: a text has collapsed if it "
               "repeats itself before a quarter of native's own onset, or ends before a quarter of "
               "native's useful tokens. Medians over the prompts; the note has each prompt's value.",
          metrics=(
        Metric("gen_collapsed", SHARE, "lower", "Collapsed",
               "share of the texts that repeat themselves before a quarter of the baseline's onset (or "
               "length) or end before a quarter of its useful tokens; Wilson interval",
               paired=True, brief=True),
        Metric("gen_useful_tokens", TOKENS, "higher", "Useful tokens",
               "tokens before a text only repeats itself or ends; median, right-censored", brief=True),
        Metric("gen_degenerated", SHARE, "lower", "Degenerated",
               "share of the texts that repeat themselves from some token to the end: at least 32 tokens, "
               "of which 90% end a 4-gram that occurred earlier in the text; Wilson interval", brief=True),
        Metric("gen_onset", STEP, "higher", "Onset",
               "the token from which they repeat themselves; median, right-censored", brief=True),
        Metric("gen_native_degenerated", SHARE, "lower", "Native degenerated",
               "the baseline's own gen_degenerated, shown with its candidates", paired=True),
        Metric("gen_native_onset", STEP, "higher", "Native onset",
               "the baseline's own gen_onset", paired=True, brief=True),
        Metric("gen_loop_onset", STEP, "higher", "Longest loop from",
               "first token of a text's longest loop, its first copy included; median, right-censored"),
        Metric("gen_loop_tokens", TOKENS, "lower", "Its tokens",
               "tokens of the longest loop in any text: one unit, at least three copies and 12 tokens"),
        Metric("gen_distinct_4grams", SHARE, "higher", "Distinct 4-grams",
               "share of distinct 4-grams up to the first end-of-text token; mean over prompts", brief=True),
        Metric("gen_first_divergence", STEP, "higher", "First divergence",
               "first token that differs from native's; median, right-censored", paired=True, brief=True),
        Metric("gen_eos", STEP, "", "End of text",
               "position of the first end-of-text token; median, right-censored"),
    )),
)  # fmt: skip
