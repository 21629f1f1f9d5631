"""Whether a published table can be true: units, ratios and identities, and what bytes and questions allow.

A rule is a function from a table to findings, listed in `RULES`; its docstring is its description. Every
comparison is of intervals (see `kvbench.published.table`): a difference that rounding explains is no finding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from kvbench.published import values as v
from kvbench.published.table import BYTES, CLAIMS, SIDES, Line, Table
from kvbench.published.values import claims_of, holds, meet, of_metric, span, time_ms, two_sided, values_of
from kvbench.stats.intervals import detectable_difference, paired_difference
from kvbench.stats.regression import SLACK


@dataclass(frozen=True)
class Finding:
    """stated, due: the number in the table and the expected one, with units; right: the correction."""

    line: int
    stated: str
    due: str
    sentence: str
    right: str
    rule: str = ""
    of: str = ""


# On a GPU a prompt of so few tokens is one pass over the weights, as a decode step is: not so many steps.
FEW_TOKENS, MANY_STEPS = 256, 4
# A kernel that only reads was measured at 1.06 of the bandwidth of a copy (docs/results.md).
READ_SLACK = Fraction(12, 10)
_SAME_SETTINGS = "both sides measured with the same settings"
LIMIT_PT = 1.0  # the change of accuracy, in points, that counts as kept where a table names none
_TIMED = ("ttft_ms", "itl_ms", "request_ms", "decode_tok_s", "prefill_tok_s")
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


def _compared(line: Line, side: str, expected: v.Interval, unit: str, because: str) -> Iterator[Finding]:
    if not meet(expected, line.numbers[side]):
        shown, right = line.shown(side), span(expected, unit)
        sentence = f"{line.metric} of the {side} is given as {shown}, but {because} {right}"
        yield _finding(line, shown, right, sentence)


def unit_label(table: Table) -> Iterator[Finding]:
    """A size that fits the model's shape only under the other unit: MB is 10^6 B, MiB is 2^20 B."""
    for line, side, size in v.of_shape(table):
        if not holds(line.numbers[side], size) and _as_other(line, side, size):
            shown, other = line.shown(side), _OTHER_UNIT[line.unit]
            factor = max(BYTES[line.unit], BYTES[other]) / min(BYTES[line.unit], BYTES[other])
            sentence = (
                f"{line.metric} of the {side} is given as {shown}, but the shape gives {size:,} B, which is "
                f"that number of {other}: the units differ by a factor of {factor:.9g}"
            )
            right = f"{line.numbers[side].text} {other}, or {v.size_in(size, line.unit)}"
            yield _finding(line, shown, f"{size:,} B", sentence, right)


def _as_other(line: Line, side: str, size: int) -> bool:
    """Whether the number would be right in the other unit of bytes."""
    other = BYTES.get(_OTHER_UNIT.get(line.unit, ""))
    return other is not None and holds(line.numbers[side], size, Fraction(other, BYTES[line.unit]))


def bytes_of_shape(table: Table) -> Iterator[Finding]:
    """A size that is not layers x heads x dimension x tokens in the format with scales, in either unit."""
    for line, side, size in v.of_shape(table):
        if not holds(line.numbers[side], size) and not _as_other(line, side, size):
            shown = line.shown(side)
            sentence = f"{line.metric} of the {side} is given as {shown}, but the shape gives {size:,} B"
            yield _finding(line, shown, f"{size:,} B", sentence, v.size_in(size, line.unit))


def byte_parts(table: Table) -> Iterator[Finding]:
    """Payload and scales that do not add up to the total."""
    values = values_of(table)
    for total, *parts in (
        ("kv_bytes_total", "kv_bytes_payload", "kv_bytes_scales"),
        ("kv_bytes_per_token", "kv_payload_per_token", "kv_scales_per_token"),
    ):
        for line, side in of_metric(table, total):
            found = [values.get(v.key_of(line, side, part)) for part in parts]
            if all(found):
                low, high = (sum(getattr(f[0][2], end) for f in found if f) for end in ("low", "high"))
                yield from _compared(line, side, (low, high), "B", "its payload and scales add up to")


def ratio_of_columns(table: Table) -> Iterator[Finding]:
    """A ratio, speed-up, saving or difference that does not follow from the two columns it compares."""
    for line in table.lines:
        for claim, expected in claims_of(line).items() if line.numbers.keys() >= set(SIDES) else ():
            stated = line.numbers.get(claim)
            if stated and not meet(expected, stated):
                shown, columns = span(expected), f"{line.shown('baseline')} against {line.shown('candidate')}"
                sentence = f"{claim} is given as {stated.text}, but {columns} ({CLAIMS[claim]}) gives {shown}"
                yield _finding(line, f"{claim} {stated.text}", shown, sentence, f"{claim} {shown}")


def stated_twice(table: Table) -> Iterator[Finding]:
    """The same quantity of the same subject with two values."""
    for places in values_of(table).values():
        first, side, number = places[0]
        for line, again, other in places[1:]:
            if not meet((number.low, number.high), other):
                name = line.texts.get("of" if again == "candidate" else "against", again)
                shown, earlier = line.shown(again), first.shown(side)
                sentence = f"{line.metric} of {name} is {shown} here and {earlier} in line {first.line}"
                right = "one value, or a column of its own for what differs between the two"
                yield _finding(line, shown, earlier, sentence, right)


def scale_of_amax(table: Table) -> Iterator[Finding]:
    """A calibrated INT8 scale that is not the largest magnitude over 127."""
    for line, side in of_metric(table, "calibrated_scale"):
        if amax := line.numbers.get("amax"):
            expected, text = (amax.low / 127, amax.high / 127), line.numbers[side].text
            if not meet(expected, line.numbers[side]):
                right = span(expected)
                sentence = f"a scale of {text} is given, but {amax.text} / 127 is {right}"
                yield _finding(line, text, right, sentence)


def rate_of_gap(table: Table) -> Iterator[Finding]:
    """Decode tok/s that is not batch / ITL, or prefill tok/s that is not batch x prompt tokens / TTFT."""
    values = values_of(table)
    for time, formula in (("itl_ms", "batch / ITL"), ("ttft_ms", "batch x prompt tokens / TTFT")):
        rate, counts = v.RATE_OF[time]
        for line, side in of_metric(table, rate):
            times = values.get(v.key_of(line, side, time))
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
            prompt, each = span(first, "ms"), span(step, "ms")
            sentence = (
                f"{subject}, which takes the baseline {prompt}, the time of {float(first[0] / step[1]):.0f} "
                f"of its decode steps of {each}, though each is one pass over the weights: start-up dominates"
            )
            yield _finding(line, prompt, each, sentence, right)
        elif not step and line.texts.get("warmup") != "yes":
            sentence = f"{subject}, and the table states neither warm-up nor the time of a decode step"
            yield _finding(line, f"{tokens} tokens", f"{FEW_TOKENS} tokens", sentence, right)


def speedup_beyond_bytes(table: Table) -> Iterator[Finding]:
    """A time that shrinks more than the bytes: the format alone cannot give that."""
    for line in two_sided(table, *_TIMED):
        allowed, speedup = v.byte_ratio(line), claims_of(line)["speedup"]
        if allowed and 1 / speedup[0] < Fraction(SLACK) * allowed[0]:
            most = f"at most {float(1 / allowed[0]):.4g}x"
            sentence = (
                f"{line.shown('baseline')} against {line.shown('candidate')} is {span(speedup)} times as "
                f"fast, but bytes in the ratio {float(allowed[0]):.4g} give {most}: {v.other_settings(table)}"
            )
            yield _finding(line, f"{span(speedup)}x", most, sentence, f"{most}, or {_SAME_SETTINGS}")


def slope_beyond_bytes(table: Table) -> Iterator[Finding]:
    """ITL that grows with the context by less than the KV bytes allow, over at least 3 contexts."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in two_sided(table, "itl_ms"):
        if "context" in line.counts:
            same = [value for key, value in v.conditions(line).items() if key != "context"]
            groups.setdefault((*same, line.texts.get("of"), line.texts.get("against")), []).append(line)
    for lines in groups.values():
        allowed = v.byte_ratio(lines[0])
        native, own = (v.fit_of(lines, side) for side in SIDES)
        if not (allowed and native and own) or native.slope <= 0:
            continue
        ratio, least = own.slope / native.slope, f"{float(allowed[0]):.4g}"
        if ratio < SLACK * float(allowed[0]):
            sentence = (
                f"over {len(lines)} contexts ITL grows by {own.slope * 1e3:.4g} us a token against "
                f"{native.slope * 1e3:.4g} us, a ratio of {ratio:.3g}, but that of the KV bytes is {least}: "
                f"confounded, {v.other_settings(table)}"
            )
            right = f"a ratio of at least {least}, or {_SAME_SETTINGS}"
            yield _finding(lines[-1], f"{ratio:.3g}", least, sentence, right)


def bandwidth(table: Table) -> Iterator[Finding]:
    """A decode step that reads its bytes faster than the device's memory can."""
    values = values_of(table)
    for line, side in (*of_metric(table, "itl_ms"), *of_metric(table, "decode_tok_s")):
        peak, read = line.numbers.get("peak_gb_s"), line.numbers.get(f"{side}_read_bytes")
        step = time_ms(values, line, side, "itl_ms")
        if read and peak and step:
            rate = read.low / step[1] / 10**6, read.high / step[0] / 10**6
            if rate[0] > READ_SLACK * peak.high:
                shown, due = span(rate, "GB/s"), f"{peak.text} GB/s"
                sentence = (
                    f"{read.text} B in a step of {span(step, 'ms')} are {shown}, the memory gives {due}"
                )
                right = f"a step of at least {float(read.low / peak.high) / 1e6:.4g} ms"
                yield _finding(line, shown, due, sentence, right)


def too_few_questions(table: Table) -> Iterator[Finding]:
    """A change of accuracy that this number of questions cannot certify, even if few changed sides."""
    for line in two_sided(table, "mcq_accuracy"):
        n = line.counts.get("questions")
        if not n:
            continue
        delta = line.numbers["candidate"].middle - line.numbers["baseline"].middle
        limit = line.numbers.get("limit_pt")
        kept = limit.middle if limit else LIMIT_PT
        claim = f"is claimed to be within {kept:g} pt" if limit else f"has no limit, so {kept:g} pt is used"
        won, lost = (max(0, min(n, round(sign * delta * n / 100))) for sign in (1, -1))
        low, high = (100 * end for end in paired_difference(won, lost, n))
        if low < -kept or high > kept:
            stated, due = f"{100 * (won - lost) / n:+.2f} pt", f"[{low:+.3g}, {high:+.3g}] pt"
            sentence = (
                f"{stated} on {n:,} questions {claim}; even with no more than {max(won + lost, 1)} of them "
                f"changing sides the 95% interval is {due}, and less than "
                f"{100 * detectable_difference(won, lost, n):.3g} pt cannot be shown"
            )
            right = (
                "the counts of questions won and lost, and enough questions for an interval within the limit"
            )
            yield _finding(line, stated, due, sentence, right)


def whole_questions(table: Table) -> Iterator[Finding]:
    """An accuracy that no whole number of right answers gives."""
    for line, side in of_metric(table, "mcq_accuracy"):
        n, number = line.counts.get("questions"), line.numbers[side]
        if n and number.high * n // 100 * 100 < number.low * n:
            right, shown = round(number.middle * n / 100), line.shown(side)
            nearest = f"{100 * right / n:.4g} %"
            sentence = (
                f"{shown} of {n:,} questions is no whole number of right answers; {right:,} are {nearest}"
            )
            instead = (
                f"{nearest}, or the number of scored questions, or a note that it averages over subjects"
            )
            yield _finding(line, shown, nearest, sentence, instead)


_UNITS_AND_BYTES = (unit_label, bytes_of_shape, byte_parts)
_CLAIMS = (ratio_of_columns, stated_twice, scale_of_amax, rate_of_gap, total_of_parts)
_POSSIBLE = (
    cold_prefill,
    speedup_beyond_bytes,
    slope_beyond_bytes,
    bandwidth,
    too_few_questions,
    whole_questions,
)
RULES: dict[str, Callable[[Table], Iterator[Finding]]] = {
    rule.__name__: rule for rule in (*_UNITS_AND_BYTES, *_CLAIMS, *_POSSIBLE)
}
