"""Whether a published table can be true: its units, ratios and identities, and what bytes and questions
allow.

A rule is a function from a table to findings, listed in `RULES`; the first line of its docstring is its
description. Every comparison is of intervals (see `kvbench.published.table`): a difference that rounding
explains is no finding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from kvbench.published.table import BYTES, CLAIMS, SIDES, Line, Table
from kvbench.published.values import (
    RATE_OF,
    Interval,
    byte_ratio,
    claims_of,
    conditions,
    ends,
    fit_of,
    holds,
    key_of,
    meet,
    of_metric,
    of_shape,
    other_settings,
    size_in,
    span,
    time_ms,
    two_sided,
    values_of,
)
from kvbench.stats.intervals import detectable_difference, paired_difference
from kvbench.stats.regression import SLACK


@dataclass(frozen=True)
class Finding:
    """stated, due: the number in the table and the expected one, with units; right: how to correct it; of:
    the line.
    """

    line: int
    stated: str
    due: str
    sentence: str
    right: str
    rule: str = ""
    of: str = ""


# On a GPU a prompt this short is one pass over the weights, as a decode step is; it should not take so many
# steps.
FEW_TOKENS, MANY_STEPS = 256, 4
# A kernel that only reads was measured at 1.06 of the bandwidth of a copy (docs/results.md).
READ_SLACK = Fraction(12, 10)
_TIMED = ("ttft_ms", "itl_ms", "request_ms", "decode_tok_s", "prefill_tok_s")
# The change of accuracy that counts as kept where a table names none, in points.
LIMIT_PT = 1.0

_OTHER_UNIT = {"KB": "KiB", "MB": "MiB", "GB": "GiB", "KiB": "KB", "MiB": "MB", "GiB": "GB"}


def check(table: Table) -> list[Finding]:
    """The findings of all rules, by line."""
    place = {line.line: line.place for line in table.lines}
    found = [replace(f, rule=name, of=place[f.line]) for name, rule in RULES.items() for f in rule(table)]
    return sorted(found, key=lambda f: f.line)


def as_text(path: Path, f: Finding) -> str:
    """`FILE:LINE: rule: which line: what does not fit. Right: ...`"""
    return f"{path}:{f.line}: {f.rule}: {f.of + ': ' if f.of else ''}{f.sentence}. Right: {f.right}."


def as_json(tables: Sequence[Table]) -> dict[str, Any]:
    """Keys: files (path, rows, findings), rules (name -> what it finds), exit_code."""
    files = [
        {"path": str(t.path), "rows": len(t.lines), "findings": [asdict(f) for f in check(t)]} for t in tables
    ]
    rules = {name: (rule.__doc__ or "").strip() for name, rule in RULES.items()}
    return {"files": files, "rules": rules, "exit_code": int(any(f["findings"] for f in files))}


def _finding(line: Line, stated: str, expected: str, sentence: str, right: str = "") -> Finding:
    return Finding(line.line, stated, expected, sentence, right or expected)


def _compared(line: Line, side: str, expected: Interval, unit: str, because: str) -> Iterator[Finding]:
    """The finding that one side's number is not the expected one, if so."""
    if not meet(expected, line.numbers[side]):
        shown, right = line.shown(side), span(expected, unit)
        sentence = f"{line.metric} of the {side} is given as {shown}, but {because} {right}"
        yield _finding(line, shown, right, sentence)


# Units and bytes


def unit_label(table: Table) -> Iterator[Finding]:
    """A size that fits the model's shape only under the other unit: MB is 10^6 B, MiB is 2^20 B."""
    for line, side, size in of_shape(table):
        shown, other = line.shown(side), _OTHER_UNIT.get(line.unit, "")
        if other and not holds(line.numbers[side], size) and _as_other(line, side, size):
            factor = max(BYTES[line.unit], BYTES[other]) / min(BYTES[line.unit], BYTES[other])
            yield _finding(
                line,
                shown,
                f"{size:,} B",
                f"{line.metric} of the {side} is given as {shown}, but the shape gives {size:,} B, which is "
                f"that number of {other}: the units differ by a factor of {factor:.9g}",
                f"{line.numbers[side].text} {other}, or {size_in(size, line.unit)}",
            )


def _as_other(line: Line, side: str, size: int) -> bool:
    """Whether the number would be right in the other unit of bytes."""
    other = _OTHER_UNIT.get(line.unit)
    return bool(other) and holds(line.numbers[side], size, Fraction(BYTES[other or ""], BYTES[line.unit]))


def bytes_of_shape(table: Table) -> Iterator[Finding]:
    """A size that is not layers x heads x dimension x tokens in the format with scales, in either unit."""
    for line, side, size in of_shape(table):
        if not holds(line.numbers[side], size) and not _as_other(line, side, size):
            shown = line.shown(side)
            sentence = f"{line.metric} of the {side} is given as {shown}, but the shape gives {size:,} B"
            yield _finding(line, shown, f"{size:,} B", sentence, size_in(size, line.unit))


def byte_parts(table: Table) -> Iterator[Finding]:
    """Payload and scales that do not add up to the total."""
    values = values_of(table)
    for total, *parts in (
        ("kv_bytes_total", "kv_bytes_payload", "kv_bytes_scales"),
        ("kv_bytes_per_token", "kv_payload_per_token", "kv_scales_per_token"),
    ):
        for line, side in of_metric(table, total):
            found = [values.get(key_of(line, side, part)) for part in parts]
            if all(found):
                low, high = (sum(getattr(f[0][2], end) for f in found if f) for end in ("low", "high"))
                yield from _compared(line, side, (low, high), "B", "its payload and scales add up to")


# Claims on two columns


def ratio_of_columns(table: Table) -> Iterator[Finding]:
    """A ratio, speed-up, saving or difference that does not follow from the two columns it compares."""
    for line in table.lines:
        for claim in CLAIMS:
            if claim not in line.numbers or not all(side in line.numbers for side in SIDES):
                continue
            expected, stated = claims_of(line)[claim], line.numbers[claim]
            if not meet(expected, stated):
                shown, columns = span(expected), f"{line.shown('baseline')} against {line.shown('candidate')}"
                sentence = f"{claim} is given as {stated.text}, but {columns} ({CLAIMS[claim]}) gives {shown}"
                yield _finding(line, f"{claim} {stated.text}", shown, sentence, f"{claim} {shown}")


def stated_twice(table: Table) -> Iterator[Finding]:
    """The same quantity of the same subject with two values."""
    for places in values_of(table).values():
        first, side, number = places[0]
        for line, again, other in places[1:]:
            if not meet(ends(number), other):
                name = line.texts.get("of" if again == "candidate" else "against", again)
                earlier = first.shown(side)
                sentence = (
                    f"{line.metric} of {name} is {line.shown(again)} here and {earlier} in line {first.line}"
                )
                right = "one value, or a column of its own for what differs between the two"
                yield _finding(line, line.shown(again), earlier, sentence, right)


def scale_of_amax(table: Table) -> Iterator[Finding]:
    """A calibrated INT8 scale that is not the largest magnitude over 127."""
    for line, side in of_metric(table, "calibrated_scale"):
        if amax := line.numbers.get("amax"):
            expected, text = (amax.low / 127, amax.high / 127), line.numbers[side].text
            if not meet(expected, line.numbers[side]):
                sentence = (
                    f"a scale of {text} is given for values up to {amax.text}, but {amax.text} / 127 is "
                    f"{span(expected)}"
                )
                yield _finding(line, text, span(expected), sentence)


# Identities of times and rates


def rate_of_gap(table: Table) -> Iterator[Finding]:
    """Decode tok/s that is not batch / ITL, or prefill tok/s that is not batch x prompt tokens / TTFT."""
    values = values_of(table)
    for time, formula in (("itl_ms", "batch / ITL"), ("ttft_ms", "batch x prompt tokens / TTFT")):
        rate, counts = RATE_OF[time]
        for line, side in of_metric(table, rate):
            times = values.get(key_of(line, side, time))
            if times and all(name in line.counts for name in counts):
                tokens = prod(line.counts[name] for name in counts) * 1000
                at, at_side, gap = times[0]
                expected = tokens / gap.high, tokens / gap.low
                because = f"{formula} with {at.shown(at_side)} (line {at.line}) is"
                yield from _compared(line, side, expected, "tok/s", because)


def total_of_parts(table: Table) -> Iterator[Finding]:
    """A request's time that is not the prompt's plus (generated tokens - 1) decode steps."""
    values = values_of(table)
    for line, side in of_metric(table, "request_ms"):
        first, step = (time_ms(values, line, side, time) for time in ("ttft_ms", "itl_ms"))
        if first and step and "new_tokens" in line.counts:
            steps = line.counts["new_tokens"] - 1
            expected = first[0] + steps * step[0], first[1] + steps * step[1]
            parts = f"{span(first, 'ms')} to the first token and {steps} steps of {span(step, 'ms')} make"
            yield from _compared(line, side, expected, "ms", parts)


# What bytes, tokens and questions allow


def cold_prefill(table: Table) -> Iterator[Finding]:
    """A speed-up read off a short prompt that takes the time of many decode steps: start-up dominates it."""
    values = values_of(table)
    for line in two_sided(table, "prefill_tok_s", "ttft_ms"):
        tokens = line.counts.get("batch", 1) * line.counts.get("context", FEW_TOKENS + 1)
        gain = claims_of(line)["speedup"]
        on_cpu = "cpu" in line.texts.get("device", "").lower()
        if tokens > FEW_TOKENS or gain[0] <= Fraction(105, 100) or on_cpu:
            continue
        first, step = (time_ms(values, line, "baseline", time) for time in ("ttft_ms", "itl_ms"))
        right = "a time of a warmed-up prompt of at least 512 tokens, with the number of warm-up requests"
        subject = f"a speed-up of {span(gain)} is read off a prompt of {tokens} tokens"
        if first and step and first[0] > MANY_STEPS * step[1]:
            yield _finding(
                line,
                span(first, "ms"),
                span(step, "ms"),
                f"{subject}, which takes the baseline {span(first, 'ms')}, the time of "
                f"{float(first[0] / step[1]):.0f} of its decode steps of {span(step, 'ms')}, though each is "
                "one pass over the weights: start-up or compilation dominates, and the tokens are too few to "
                "tell",
                right,
            )
        elif not step and line.texts.get("warmup") != "yes":
            sentence = (
                f"{subject}, and the table states neither warm-up nor the time of a decode step: it may all "
                "be start-up"
            )
            yield _finding(line, f"{tokens} tokens", f"{FEW_TOKENS} tokens", sentence, right)


def speedup_beyond_bytes(table: Table) -> Iterator[Finding]:
    """A time that shrinks more than the bytes: the format alone cannot give that."""
    for line in two_sided(table, *_TIMED):
        allowed, speedup = byte_ratio(line), claims_of(line)["speedup"]
        if allowed and 1 / speedup[0] < Fraction(SLACK) * allowed[0]:
            most = f"at most {float(1 / allowed[0]):.4g}x"
            yield _finding(
                line,
                f"{span(speedup)}x",
                most,
                f"{line.shown('baseline')} against {line.shown('candidate')} is {span(speedup)} times as "
                f"fast, but bytes in the ratio {float(allowed[0]):.4g} give {most}: {other_settings(table)}",
                f"{most}, or both sides measured with the same settings",
            )


def slope_beyond_bytes(table: Table) -> Iterator[Finding]:
    """ITL that grows with the context by less than the KV bytes allow, over at least 3 contexts."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in two_sided(table, "itl_ms"):
        if "context" in line.counts:
            same = [v for k, v in conditions(line).items() if k != "context"]
            groups.setdefault((*same, line.texts.get("of"), line.texts.get("against")), []).append(line)
    for lines in groups.values():
        allowed = byte_ratio(lines[0])
        native, own = (fit_of(lines, side) for side in SIDES)
        if not (allowed and native and own) or native.slope <= 0:
            continue
        ratio = own.slope / native.slope
        if ratio < SLACK * float(allowed[0]):
            least = f"{float(allowed[0]):.4g}"
            yield _finding(
                lines[-1],
                f"{ratio:.3g}",
                least,
                f"over {len(lines)} contexts ITL grows by {own.slope * 1e3:.4g} us a token against "
                f"{native.slope * 1e3:.4g} us, a ratio of {ratio:.3g}, but that of the KV bytes is {least}: "
                f"confounded, {other_settings(table)}",
                f"a ratio of at least {least}, or both sides measured with the same settings",
            )


def bandwidth(table: Table) -> Iterator[Finding]:
    """A decode step that reads its bytes faster than the device's memory can."""
    values = values_of(table)
    for line, side in (*of_metric(table, "itl_ms"), *of_metric(table, "decode_tok_s")):
        peak, read = line.numbers.get("peak_gb_s"), line.numbers.get(f"{side}_read_bytes")
        step = time_ms(values, line, side, "itl_ms")
        if read and peak and step:
            rate = read.low / step[1] / 10**6, read.high / step[0] / 10**6
            if rate[0] > READ_SLACK * peak.high:
                shown = span(rate, "GB/s")
                sentence = (
                    f"{read.text} B in a step of {span(step, 'ms')} are {shown}, but the memory gives "
                    f"{peak.text} GB/s"
                )
                right = f"a step of at least {float(read.low / peak.high) / 1e6:.4g} ms"
                yield _finding(line, shown, f"{peak.text} GB/s", sentence, right)


def too_few_questions(table: Table) -> Iterator[Finding]:
    """A change of accuracy that this number of questions cannot certify, even if few changed sides."""
    for line in two_sided(table, "mcq_accuracy"):
        n = line.counts.get("questions")
        if not n:
            continue
        delta = line.numbers["candidate"].middle - line.numbers["baseline"].middle
        limit = line.numbers.get("limit_pt")
        kept = limit.middle if limit else LIMIT_PT
        won, lost = (max(0, min(n, round(sign * delta * n / 100))) for sign in (1, -1))
        low, high = (100 * end for end in paired_difference(won, lost, n))
        if low < -kept or high > kept:
            claim = (
                f"is claimed to be within {kept:g} pt" if limit else f"has no limit, so {kept:g} pt is used"
            )
            least, delta = 100 * detectable_difference(won, lost, n), 100 * (won - lost) / n
            yield _finding(
                line,
                f"{delta:+.2f} pt",
                f"[{low:+.3g}, {high:+.3g}] pt",
                f"{delta:+.2f} pt on {n:,} questions {claim}; even with no more than {max(won + lost, 1)} of "
                f"them changing sides the 95% interval is [{low:+.3g}, {high:+.3g}] pt, and less than "
                f"{least:.3g} pt cannot be shown",
                "the counts of questions won and lost, and enough questions for an interval within the limit",
            )


def whole_questions(table: Table) -> Iterator[Finding]:
    """An accuracy that no whole number of right answers gives."""
    for line, side in of_metric(table, "mcq_accuracy"):
        n, number = line.counts.get("questions"), line.numbers[side]
        if n and number.high * n // 100 * 100 < number.low * n:
            right = round(number.middle * n / 100)
            nearest = f"{100 * right / n:.4g} %"
            yield _finding(
                line,
                line.shown(side),
                nearest,
                (
                    f"{line.shown(side)} of {n:,} questions is no whole number of right answers; {right:,} "
                    f"of them are {nearest}"
                ),
                (
                    f"{nearest}, or the number of questions that were scored, or a note that it is an "
                    "average over subjects"
                ),
            )


RULES: dict[str, Callable[[Table], Iterator[Finding]]] = {
    rule.__name__: rule
    for rule in (
        unit_label,
        bytes_of_shape,
        byte_parts,
        ratio_of_columns,
        stated_twice,
        scale_of_amax,
        rate_of_gap,
        total_of_parts,
        cold_prefill,
        speedup_beyond_bytes,
        slope_beyond_bytes,
        bandwidth,
        too_few_questions,
        whole_questions,
    )
}
