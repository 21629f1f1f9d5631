"""What the rules on published tables work with: intervals of what rounds to a number, and numbers found by what they are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from kvbench.published.table import BYTES, SIDES, Line, Stated, Table
from kvbench.stats.regression import CONTEXTS, fit
from kvbench.stats.regression import Line as Fit

Interval = tuple[Fraction, Fraction]
Values = Mapping[tuple[object, ...], list[tuple[Line, str, Stated]]]

# What must be equal for two numbers of the same metric and name to be one quantity.
_SAME = ("model", "device", "data", "batch", "context", "new_tokens", "tokens", "questions")


def meet(due: Interval, number: Stated) -> bool:
    return due[0] <= number.high and number.low <= due[1]


def holds(number: Stated, value: int) -> bool:
    return number.low <= value <= number.high


def in_unit(line: Line, side: str, unit: str) -> Stated:
    """The number of one side as if it stood in another unit of bytes."""
    number, factor = line.numbers[side], Fraction(BYTES[unit], BYTES[line.unit])
    return Stated(number.text, number.low * factor, number.high * factor)


def size_in(value: int, unit: str) -> str:
    return f"{value:,} B" if unit in ("B", "B/token") else f"{value / BYTES[unit]:.4g} {unit}"


def span(ends: Interval, unit: str) -> str:
    """One number where both ends round to it, else `a to b`."""
    low, high = (f"{float(end):.4g}" for end in ends)
    return (low if low == high else f"{low} to {high}") + (f" {unit}" if unit else "")


def stated(table: Table, metric: str) -> Iterator[tuple[Line, str]]:
    for line in table.lines:
        if line.metric == metric:
            yield from ((line, side) for side in SIDES if side in line.numbers)


def subject(line: Line) -> dict[str, object]:
    return {key: line.texts.get(key, line.counts.get(key)) for key in _SAME}


def key_of(line: Line, side: str, metric: str) -> tuple[object, ...]:
    """What a number is of: the metric, under which conditions, and whose it is."""
    name = line.texts.get("of" if side == "candidate" else "against", side)
    return (metric, *subject(line).values(), name)


def values_of(table: Table) -> Values:
    found: dict[tuple[object, ...], list[tuple[Line, str, Stated]]] = {}
    for line in table.lines:
        for side in SIDES:
            if side in line.numbers:
                found.setdefault(key_of(line, side, line.metric), []).append((line, side, line.numbers[side]))
    return found


def claims_of(line: Line) -> dict[str, Interval]:
    """What each claim is by the two columns, as intervals."""
    base, own = line.numbers["baseline"], line.numbers["candidate"]
    up, down = (own.low / base.high, own.high / base.low), (base.low / own.high, base.high / own.low)
    return {
        "ratio": up,
        "speedup": up if line.quantity.higher else down,
        "compression": down,
        "change_pct": ((up[0] - 1) * 100, (up[1] - 1) * 100),
        "saving_pct": ((1 - up[1]) * 100, (1 - up[0]) * 100),
        "delta_pt": (own.low - base.high, own.high - base.low),
    }


def sized(table: Table) -> Iterator[tuple[Line, str, int]]:
    """Sizes of the KV cache whose model shape is given, with the bytes that the shape has."""
    for line in table.lines:
        token = line.metric == "kv_bytes_per_token"
        if line.metric != "kv_bytes_total" and not token:
            continue
        if not all(name in line.counts for name in ("layers", "kv_heads", "head_dim")):
            continue
        tokens = 1 if token else line.counts.get("tokens")
        for side in SIDES:
            fmt = "native" if side == "baseline" else line.texts.get("kv_format")
            if side in line.numbers and tokens and fmt:
                due = _shape_bytes(line, fmt, tokens)
                yield line, side, due - _shape_bytes(line, fmt, 0) if token else due


def _shape_bytes(line: Line, fmt: str, tokens: int) -> int:
    dim = line.counts["head_dim"]
    shape = KVShape(line.counts["kv_heads"], dim, dim)
    dtype = line.texts.get("native_dtype", "bfloat16")
    return line.counts["layers"] * kv_bytes(KV_FORMATS[fmt], shape, tokens, dtype).total


def byte_ratio(line: Line) -> Interval | None:
    """Candidate's bytes over the baseline's: as given, or those of a token's K and V; None where neither is known."""
    if given := line.numbers.get("byte_ratio"):
        return given.low, given.high
    fmt, dim = line.texts.get("kv_format"), line.counts.get("head_dim")
    if fmt is None or dim is None:
        return None
    shape, dtype = KVShape(1, dim, dim), line.texts.get("native_dtype", "bfloat16")
    native, own = (
        kv_bytes(KV_FORMATS[name], shape, 1, dtype).total - kv_bytes(KV_FORMATS[name], shape, 0, dtype).total
        for name in ("native", fmt)
    )
    return Fraction(own, native), Fraction(own, native)


def step_ms(values: Values, line: Line, side: str) -> Interval | None:
    """ms of a decode step: ITL, or batch / decode rate."""
    if gap := values.get(key_of(line, side, "itl_ms")):
        return gap[0][2].low, gap[0][2].high
    rate, batch = values.get(key_of(line, side, "decode_tok_s")), line.counts.get("batch")
    return (batch * 1000 / rate[0][2].high, batch * 1000 / rate[0][2].low) if rate and batch else None


def prompt_ms(values: Values, line: Line, side: str) -> Interval | None:
    """ms to the first token: TTFT, or prompt tokens / prefill rate."""
    if first := values.get(key_of(line, side, "ttft_ms")):
        return first[0][2].low, first[0][2].high
    rate, counts = values.get(key_of(line, side, "prefill_tok_s")), line.counts
    if not rate or "batch" not in counts or "context" not in counts:
        return None
    tokens = counts["batch"] * counts["context"] * 1000
    return tokens / rate[0][2].high, tokens / rate[0][2].low


def fit_of(lines: list[Line], side: str) -> Fit | None:
    if len(lines) < CONTEXTS:
        return None
    return fit([line.counts["context"] for line in lines], [line.numbers[side].middle for line in lines])


def besides(table: Table) -> str:
    """The settings that differ, or that the table names none."""
    base, own = (table.settings[side] for side in SIDES)
    differing = [
        f"{key} {own.get(key, 'not stated')} against {base.get(key, 'not stated')}"
        for key in dict.fromkeys((*base, *own))
        if base.get(key) != own.get(key)
    ]
    if differing:
        return f"what differs besides the format is {', '.join(differing)}"
    return "the table names no other setting that differs, so something besides the format was measured"


def whole(number: Stated, n: int) -> bool:
    """Whether some count of right answers rounds to this accuracy (in %)."""
    return number.high * n // 100 * 100 >= number.low * n
