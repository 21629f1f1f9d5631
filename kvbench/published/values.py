"""Intervals and quantities of a published table: what the rules compare."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import prod

from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from kvbench.published.table import BYTES, SIDES, Line, Stated, Table
from kvbench.stats.regression import Line as Fit
from kvbench.stats.regression import fit

Interval = tuple[Fraction, Fraction]
Values = Mapping[tuple[object, ...], list[tuple[Line, str, Stated]]]

# Two numbers of one metric and name are the same quantity only where all of these are equal.
_SAME = ("model", "device", "data", "batch", "context", "new_tokens", "tokens", "questions")
# Time -> its rate, and the counts whose product is the tokens of that rate.
RATE_OF = {"itl_ms": ("decode_tok_s", ("batch",)), "ttft_ms": ("prefill_tok_s", ("batch", "context"))}


def meet(interval: Interval, number: Stated) -> bool:
    return interval[0] <= number.high and number.low <= interval[1]


def holds(number: Stated, value: int, factor: Fraction = Fraction(1)) -> bool:
    return number.low * factor <= value <= number.high * factor


def span(ends: Interval, unit: str = "") -> str:
    low, high = (f"{float(end):.4g}" for end in ends)
    return (low if low == high else f"{low} to {high}") + (f" {unit}" if unit else "")


def size_in(value: int, unit: str) -> str:
    return f"{value:,} B" if unit in ("B", "B/token") else f"{value / BYTES[unit]:.4g} {unit}"


def of_metric(table: Table, metric: str) -> Iterator[tuple[Line, str]]:
    return ((x, side) for x in table.lines if x.metric == metric for side in SIDES if side in x.numbers)


def two_sided(table: Table, *metrics: str) -> Iterator[Line]:
    return (x for x in table.lines if x.metric in metrics and all(side in x.numbers for side in SIDES))


def conditions(line: Line) -> dict[str, object]:
    return {key: line.texts.get(key, line.counts.get(key)) for key in _SAME}


def key_of(line: Line, side: str, metric: str) -> tuple[object, ...]:
    """Identifies a quantity: the metric, the conditions, and which system it is of."""
    name = line.texts.get("of" if side == "candidate" else "against", side)
    return (metric, *conditions(line).values(), name)


def values_of(table: Table) -> Values:
    found: dict[tuple[object, ...], list[tuple[Line, str, Stated]]] = {}
    for line in table.lines:
        for side in SIDES:
            if side in line.numbers:
                found.setdefault(key_of(line, side, line.metric), []).append((line, side, line.numbers[side]))
    return found


def claims_of(line: Line) -> dict[str, Interval]:
    """Each claim as it follows from the two columns."""
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


def _kv_bytes(line: Line, fmt: str, tokens: int, layers: int, heads: int) -> int:
    dim, dtype = line.counts["head_dim"], line.texts.get("native_dtype", "bfloat16")
    return layers * kv_bytes(KV_FORMATS[fmt], KVShape(heads, dim, dim), tokens, dtype).total


def of_shape(table: Table) -> Iterator[tuple[Line, str, int]]:
    """Sizes of the KV cache whose model shape is given, with the bytes of that shape."""
    for metric in ("kv_bytes_total", "kv_bytes_per_token"):
        for line, side in of_metric(table, metric):
            fmt = "native" if side == "baseline" else line.texts.get("kv_format")
            tokens = 1 if metric == "kv_bytes_per_token" else line.counts.get("tokens")
            if fmt and tokens and all(name in line.counts for name in ("layers", "kv_heads", "head_dim")):
                shape = line.counts["layers"], line.counts["kv_heads"]
                fixed = _kv_bytes(line, fmt, 0, *shape) if metric == "kv_bytes_per_token" else 0
                yield line, side, _kv_bytes(line, fmt, tokens, *shape) - fixed


def byte_ratio(line: Line) -> Interval | None:
    """Candidate's bytes over the baseline's, as given or of a token's K and V; None where unknown."""
    if given := line.numbers.get("byte_ratio"):
        return given.low, given.high
    fmt = line.texts.get("kv_format")
    if fmt is None or "head_dim" not in line.counts:
        return None
    native, own = (_kv_bytes(line, f, 1, 1, 1) - _kv_bytes(line, f, 0, 1, 1) for f in ("native", fmt))
    return Fraction(own, native), Fraction(own, native)


def time_ms(values: Values, line: Line, side: str, time: str) -> Interval | None:
    """ms of a decode step ("itl_ms") or of the prompt ("ttft_ms"): as given, or tokens over the rate."""
    if given := values.get(key_of(line, side, time)):
        return given[0][2].low, given[0][2].high
    rate, counts = RATE_OF[time]
    found = values.get(key_of(line, side, rate))
    if not found or not all(name in line.counts for name in counts):
        return None
    tokens = prod(line.counts[name] for name in counts) * 1000
    return tokens / found[0][2].high, tokens / found[0][2].low


def fit_of(lines: list[Line], side: str) -> Fit | None:
    return fit([line.counts["context"] for line in lines], [line.numbers[side].middle for line in lines])


def other_settings(table: Table) -> str:
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
