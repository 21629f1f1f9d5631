"""Whether a published table can be true: its units, its ratios, its identities, and what bytes and questions allow.

A rule is a function from a table to findings, under its name in `RULES`; its docstring says what it asks. Adding one is that
function and its line there. Every comparison is of intervals (see `kvbench.published.table`): a number that rounding explains is
consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvbench.published.table import BYTES, CLAIMS, SIDES, Line, Table
from kvbench.published.values import (
    besides,
    byte_ratio,
    claims_of,
    fit_of,
    holds,
    in_unit,
    key_of,
    meet,
    prompt_ms,
    size_in,
    sized,
    span,
    stated,
    step_ms,
    subject,
    values_of,
    whole,
)  # fmt: skip
from kvbench.stats.intervals import detectable_difference, paired_difference
from kvbench.stats.regression import SLACK


@dataclass(frozen=True)
class Finding:
    """stated, due: the two numbers that do not fit, with units; right: what would be right; of: the line in words."""

    line: int
    stated: str
    due: str
    sentence: str
    right: str
    rule: str = ""
    of: str = ""


# A prompt this short is one pass over the weights on a GPU, as a decode step is; so many steps are another thing.
FEW_TOKENS, MANY_STEPS = 256, 4
# A kernel that only reads was measured at 1.06 of the bandwidth of a copy (docs/results.md).
READ_SLACK = Fraction(12, 10)
_TIMED = ("ttft_ms", "itl_ms", "request_ms", "decode_tok_s", "prefill_tok_s")
# The change of accuracy that counts as kept where a table names none, in points.
LIMIT_PT = 1.0

_OTHER_UNIT = {"KB": "KiB", "MB": "MiB", "GB": "GiB", "KiB": "KB", "MiB": "MB", "GiB": "GB"}


def check(table: Table) -> list[Finding]:
    """What the rules find, by line."""
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


# units and bytes


def unit_label(table: Table) -> Iterator[Finding]:
    """A size that fits the model's shape only under the other unit: MB is 10^6 B, MiB is 2^20 B."""
    for line, side, due in sized(table):
        other = _OTHER_UNIT.get(line.unit, "")
        if not holds(line.numbers[side], due) and other and holds(in_unit(line, side, other), due):
            factor = max(BYTES[line.unit], BYTES[other]) / min(BYTES[line.unit], BYTES[other])
            yield Finding(
                line.line, line.shown(side), f"{due:,} B",
                f"{line.metric} of the {side} is given as {line.shown(side)} and the shape gives {due:,} B, which is so many "
                f"{other}: the units differ by a factor of {factor:.9g}",
                f"{line.numbers[side].text} {other}, or {size_in(due, line.unit)}",
            )  # fmt: skip


def bytes_of_shape(table: Table) -> Iterator[Finding]:
    """A size that is not layers x heads x dimension x tokens in the format, scales included, under any unit."""
    for line, side, due in sized(table):
        other = _OTHER_UNIT.get(line.unit, "")
        if not holds(line.numbers[side], due) and not (other and holds(in_unit(line, side, other), due)):
            yield Finding(
                line.line, line.shown(side), f"{due:,} B",
                f"{line.metric} of the {side} is given as {line.shown(side)} and the shape gives {due:,} B",
                size_in(due, line.unit),
            )  # fmt: skip


def byte_parts(table: Table) -> Iterator[Finding]:
    """Payload and scales that do not add up to the total."""
    sums = (
        ("kv_bytes_total", "kv_bytes_payload", "kv_bytes_scales"),
        ("kv_bytes_per_token", "kv_payload_per_token", "kv_scales_per_token"),
    )
    values = values_of(table)
    for total, *parts in sums:
        for line, side in stated(table, total):
            found = [values.get(key_of(line, side, part)) for part in parts]
            if all(found):
                low, high = (sum(getattr(f[0][2], end) for f in found if f) for end in ("low", "high"))
                if not meet((low, high), line.numbers[side]):
                    yield Finding(
                        line.line, line.shown(side), span((low, high), "B"),
                        f"{total} of the {side} is given as {line.shown(side)} and its payload and scales add up to "
                        f"{span((low, high), 'B')}",
                        span((low, high), "B"),
                    )  # fmt: skip


# what is said of two columns


def ratio_of_columns(table: Table) -> Iterator[Finding]:
    """A ratio, speed-up, saving or difference that does not follow from the two columns it compares."""
    for line in table.lines:
        for claim in CLAIMS:
            if claim in line.numbers and all(side in line.numbers for side in SIDES):
                due = claims_of(line)[claim]
                if not meet(due, line.numbers[claim]):
                    shown = span(due, "")
                    yield Finding(
                        line.line, f"{claim} {line.numbers[claim].text}", shown,
                        f"{claim} is given as {line.numbers[claim].text}, and {line.shown('baseline')} against "
                        f"{line.shown('candidate')} ({CLAIMS[claim]}) gives {shown}",
                        f"{claim} {shown}",
                    )  # fmt: skip


def stated_twice(table: Table) -> Iterator[Finding]:
    """The same quantity of the same subject with two values."""
    for places in values_of(table).values():
        first, side, number = places[0]
        for line, again, other in places[1:]:
            if not meet((number.low, number.high), other):
                yield Finding(
                    line.line, line.shown(again), first.shown(side),
                    f"{line.metric} of {line.texts.get('of' if again == 'candidate' else 'against', again)} is "
                    f"{line.shown(again)} here and {first.shown(side)} in line {first.line}",
                    "one value, or what differs between the two in a column of its own",
                )  # fmt: skip


def scale_of_amax(table: Table) -> Iterator[Finding]:
    """A calibrated INT8 scale that is not the largest magnitude over 127."""
    for line, side in stated(table, "calibrated_scale"):
        if "amax" in line.numbers:
            amax = line.numbers["amax"]
            due = amax.low / 127, amax.high / 127
            if not meet(due, line.numbers[side]):
                yield Finding(
                    line.line, line.numbers[side].text, span(due, ""),
                    f"a scale of {line.numbers[side].text} is given for values up to {amax.text}, and {amax.text} / 127 is "
                    f"{span(due, '')}",
                    span(due, ""),
                )  # fmt: skip


# identities of times and rates


def rate_of_gap(table: Table) -> Iterator[Finding]:
    """Decode tok/s that is not batch / ITL, or prefill tok/s that is not batch x prompt tokens / TTFT."""
    values = values_of(table)
    for rate, time, words, needs in (
        ("decode_tok_s", "itl_ms", "batch / ITL", ("batch",)),
        ("prefill_tok_s", "ttft_ms", "batch x prompt tokens / TTFT", ("batch", "context")),
    ):
        for line, side in stated(table, rate):
            gaps = values.get(key_of(line, side, time))
            if gaps and all(name in line.counts for name in needs):
                tokens = 1
                for name in needs:
                    tokens *= line.counts[name]
                gap_line, gap_side, gap = gaps[0]
                due = tokens * 1000 / gap.high, tokens * 1000 / gap.low
                if not meet(due, line.numbers[side]):
                    shown = span(due, "tok/s")
                    yield Finding(
                        line.line, line.shown(side), shown,
                        f"{rate} of the {side} is given as {line.shown(side)}, and {words} with {gap_line.shown(gap_side)} "
                        f"(line {gap_line.line}) is {shown}",
                        shown,
                    )  # fmt: skip


def total_of_parts(table: Table) -> Iterator[Finding]:
    """A request's time that is not the prompt's plus (generated tokens - 1) decode steps."""
    values = values_of(table)
    for line, side in stated(table, "request_ms"):
        first, step = prompt_ms(values, line, side), step_ms(values, line, side)
        if first and step and "new_tokens" in line.counts:
            steps = line.counts["new_tokens"] - 1
            due = first[0] + steps * step[0], first[1] + steps * step[1]
            if not meet(due, line.numbers[side]):
                shown = span(due, "ms")
                yield Finding(
                    line.line, line.shown(side), shown,
                    f"request_ms of the {side} is given as {line.shown(side)}, and {span(first, 'ms')} to the first token and "
                    f"{steps} steps of {span(step, 'ms')} make {shown}",
                    shown,
                )  # fmt: skip


# what bytes, tokens and questions allow


def cold_prefill(table: Table) -> Iterator[Finding]:
    """A short prompt that takes many decode steps' time and is sold as a speed-up: start-up dominates it."""
    values = values_of(table)
    for line in table.lines:
        if line.metric not in ("prefill_tok_s", "ttft_ms") or not all(side in line.numbers for side in SIDES):
            continue
        tokens = line.counts.get("batch", 1) * line.counts.get("context", FEW_TOKENS + 1)
        gain = claims_of(line)["speedup"][0]
        if tokens > FEW_TOKENS or gain <= Fraction(105, 100) or "cpu" in line.texts.get("device", "").lower():
            continue
        first, step = prompt_ms(values, line, "baseline"), step_ms(values, line, "baseline")
        right = "a time of a warmed-up prompt of at least 512 tokens, with the number of warm-up requests"
        said = f"a speed-up of {span(claims_of(line)['speedup'], '')} is read off a prompt of {tokens} tokens"
        if first and step and first[0] > MANY_STEPS * step[1]:
            yield Finding(
                line.line, span(first, "ms"), span(step, "ms"),
                f"{said}, which takes the baseline {span(first, 'ms')}, the time of {float(first[0] / step[1]):.0f} of its decode "
                f"steps of {span(step, 'ms')}, though each is one pass over the weights: start-up or compilation dominates, and "
                "the tokens are too few to tell",
                right,
            )  # fmt: skip
        elif not step and line.texts.get("warmup") != "yes":
            yield Finding(
                line.line, f"{tokens} tokens", f"{FEW_TOKENS} tokens",
                f"{said}, without a word on warm-up or the time of a decode step: start-up may be all of it",
                right,
            )  # fmt: skip


def speedup_beyond_bytes(table: Table) -> Iterator[Finding]:
    """A time that shrinks more than the bytes: the format alone cannot give that."""
    for line in table.lines:
        allowed = byte_ratio(line)
        if allowed and line.metric in _TIMED and all(side in line.numbers for side in SIDES):
            speedup = claims_of(line)["speedup"]
            if 1 / speedup[0] < Fraction(SLACK) * allowed[0]:
                due = f"at most {float(1 / allowed[0]):.4g}x"
                yield Finding(
                    line.line, f"{span(speedup, '')}x", due,
                    f"{line.shown('baseline')} against {line.shown('candidate')} is {span(speedup, '')} times as fast, and bytes in "
                    f"the ratio {float(allowed[0]):.4g} give {due}: {besides(table)}",
                    f"{due}, or both sides measured with the same settings",
                )  # fmt: skip


def slope_beyond_bytes(table: Table) -> Iterator[Finding]:
    """ITL that grows with the context by less than the KV bytes allow, by a line through at least 3 contexts."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in table.lines:
        if (
            line.metric == "itl_ms"
            and "context" in line.counts
            and all(side in line.numbers for side in SIDES)
        ):
            same = [v for k, v in subject(line).items() if k != "context"]
            groups.setdefault((*same, line.texts.get("of"), line.texts.get("against")), []).append(line)
    for lines in groups.values():
        allowed = byte_ratio(lines[0])
        native, own = (fit_of(lines, side) for side in SIDES)
        if not (allowed and native and own) or native.slope <= 0:
            continue
        ratio = own.slope / native.slope
        if ratio < SLACK * float(allowed[0]):
            due = f"{float(allowed[0]):.4g}"
            yield Finding(
                lines[-1].line, f"{ratio:.3g}", due,
                f"over {len(lines)} contexts ITL grows by {own.slope * 1e3:.4g} us a token against {native.slope * 1e3:.4g} us, a ratio "
                f"of {ratio:.3g} where the KV bytes have {due}: confounded, {besides(table)}",
                f"a ratio of at least {due}, or both sides measured with the same settings",
            )  # fmt: skip


def bandwidth(table: Table) -> Iterator[Finding]:
    """A decode step that reads its bytes faster than the device's memory can."""
    values = values_of(table)
    for line in table.lines:
        peak = line.numbers.get("peak_gb_s")
        for side in SIDES:
            read, step = line.numbers.get(f"{side}_read_bytes"), step_ms(values, line, side)
            if line.metric in ("itl_ms", "decode_tok_s") and side in line.numbers and read and peak and step:
                rate = read.low / step[1] / 10**6, read.high / step[0] / 10**6
                if rate[0] > READ_SLACK * peak.high:
                    yield Finding(
                        line.line, span(rate, "GB/s"), f"{peak.text} GB/s",
                        f"{read.text} B in a step of {span(step, 'ms')} are {span(rate, 'GB/s')}, and the memory gives {peak.text} GB/s",
                        f"a step of at least {float(read.low / peak.high) / 1e6:.4g} ms",
                    )  # fmt: skip


def too_few_questions(table: Table) -> Iterator[Finding]:
    """A change of accuracy that so many questions cannot certify, however few of them changed sides."""
    for line in table.lines:
        n = line.counts.get("questions")
        if line.metric != "mcq_accuracy" or not n or not all(side in line.numbers for side in SIDES):
            continue
        delta = line.numbers["candidate"].middle - line.numbers["baseline"].middle
        limit = line.numbers.get("limit_pt")
        kept = limit.middle if limit else LIMIT_PT
        won, lost = (max(0, min(n, round(sign * delta * n / 100))) for sign in (1, -1))
        low, high = (100 * end for end in paired_difference(won, lost, n))
        if low < -kept or high > kept:
            said = (
                f"is said to be within {kept:g} pt"
                if limit
                else f"has no limit, so that {kept:g} pt is taken"
            )
            least, delta = 100 * detectable_difference(won, lost, n), 100 * (won - lost) / n
            yield Finding(
                line.line, f"{delta:+.2f} pt", f"[{low:+.3g}, {high:+.3g}] pt",
                f"{delta:+.2f} pt on {n:,} questions {said}; even with no more than {max(won + lost, 1)} "
                f"of them changing sides the 95% interval is [{low:+.3g}, {high:+.3g}] pt, and less than {least:.3g} pt cannot be shown",
                "the counts of questions won and lost, and enough questions for an interval within the limit",
            )  # fmt: skip


def whole_questions(table: Table) -> Iterator[Finding]:
    """An accuracy that no whole number of right answers gives."""
    for line, side in stated(table, "mcq_accuracy"):
        n, number = line.counts.get("questions"), line.numbers[side]
        if n and not whole(number, n):
            nearest = round(number.middle * n / 100)
            due = f"{100 * nearest / n:.4g} %"
            yield Finding(
                line.line, line.shown(side), due,
                f"{line.shown(side)} of {n:,} questions is no whole number of right answers; {nearest:,} of them are {due}",
                f"{due}, or the number of questions that were scored, or the word that it is an average over subjects",
            )  # fmt: skip


RULES: dict[str, Callable[[Table], Iterator[Finding]]] = {
    "unit_label": unit_label,
    "bytes_of_shape": bytes_of_shape,
    "byte_parts": byte_parts,
    "ratio_of_columns": ratio_of_columns,
    "stated_twice": stated_twice,
    "scale_of_amax": scale_of_amax,
    "rate_of_gap": rate_of_gap,
    "total_of_parts": total_of_parts,
    "cold_prefill": cold_prefill,
    "speedup_beyond_bytes": speedup_beyond_bytes,
    "slope_beyond_bytes": slope_beyond_bytes,
    "bandwidth": bandwidth,
    "too_few_questions": too_few_questions,
    "whole_questions": whole_questions,
}
