"""Numbers and text as a person reads them: each value with its unit, its interval and its sample count.

Nothing here decides what is shown, only how. Three things are never confused: a measured zero ("0"), a value that
was not measured ("not measured"), and a measurement that came out as no number ("NaN").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.metrics.collect import Row

NOT_MEASURED = "not measured"

# Significant digits of a value that has no interval; with an interval its width decides. A bare number that is
# exact in a few digits more (a ratio of bytes) is printed whole.
_TIMES = ("ms", "tok/s", "GB/s", "s")
_DIGITS = dict.fromkeys((*_TIMES, "%", "pt", "nat", "logit"), 4)
_DEFAULT_DIGITS = 6
_EXACT_DIGITS = 8
# Units that only say what kind of number it is; a table names them in its heading, not beside each value.
KINDS = frozenset({"", "ratio", "share", "p-value", "cosine", "error", "ppl", "paths"})
# Units of things that are counted: printed whole where they are whole.
_WHOLE = ("B", "B/token", "step", "tokens", "questions", "requests", "paths", "codes")


@dataclass(frozen=True)
class Shown:
    """One number, ready to print; the parts are apart so that a page can set them in different weights.

    text: the number or NOT_MEASURED; unit: "" when there is none; also: the same bytes in MiB and MB; interval:
    "[low, high]" (95%) or ""; n: "n = 48" or ""; exact: the number with full precision, for machines, or "";
    state: "measured", "missing" or "nan".
    """

    text: str
    unit: str = ""
    also: str = ""
    interval: str = ""
    n: str = ""
    exact: str = ""
    state: str = "measured"

    @property
    def shown_unit(self) -> str:
        """The unit to set beside the number: none for kinds, which a heading names, nor where nothing was measured."""
        return "" if self.unit in KINDS or self.state == "missing" else self.unit

    @property
    def spread(self) -> str:
        """`[12.12, 12.57], n = 48`"""
        return ", ".join(part for part in (self.interval, self.n) if part)

    @property
    def brief(self) -> str:
        """In one line, without the count: `12.35 ms [12.12, 12.57]`."""
        return " ".join(part for part in (self.text, self.shown_unit, self.also, self.interval) if part)


def shown(value: float | None, unit: str = "", *, low: float | None = None, high: float | None = None,
          n: int | None = None, signed: bool = False) -> Shown:  # fmt: skip
    """A value with what it needs to be read. Missing stays missing and NaN stays NaN, whatever the unit."""
    count = "" if n is None else f"n = {n:,}"
    if value is None:
        return Shown(NOT_MEASURED, n=count, state="missing")
    if not math.isfinite(value):
        return Shown(non_finite(value), unit, n=count, exact=non_finite(value), state="nan")
    decimals = _interval_decimals(low, high)
    interval = ""
    if low is not None and high is not None:
        ends = (number(end, unit, _two_digits(end, decimals), signed) for end in (low, high))
        interval = f"[{', '.join(ends)}]"
    also = f"({in_megabytes(value)})" if unit == "B" and value else ""
    text = number(value, unit, _two_digits(value, decimals), signed)
    return Shown(text, unit, also, interval, count, exact(value))


def shown_row(row: Row) -> Shown:
    """Differences (percent, points) carry their sign; what was not seen in so many steps is at none."""
    if row.unit == "step" and row.value is not None and row.value == row.n:
        # Steps count from 0: step n is past the last one.
        return Shown(f"none in {row.n:,}", exact=exact(row.value))
    return shown(row.value, row.unit, low=row.low, high=row.high, n=row.n, signed=row.unit in ("%", "pt"))


def number(value: float, unit: str = "", decimals: int | None = None, signed: bool = False) -> str:
    """`decimals` None: as many as the unit's significant digits ask for. Integers are printed whole."""
    if not math.isfinite(value):
        return non_finite(value)
    sign = "+" if signed else ""
    if isinstance(value, int) or (unit in _WHOLE and decimals is None and value == int(value)):
        return f"{int(value):{sign},d}"
    if decimals is not None:
        return f"{value:{sign},.{decimals}f}"
    digits = _DIGITS.get(unit, _DEFAULT_DIGITS)
    if value == 0:
        return f"{value:{sign}.0f}"
    if (unit in KINDS or unit in _WHOLE) and float(f"{value:.{_EXACT_DIGITS}g}") == value:
        digits = _EXACT_DIGITS
    exponent = math.floor(math.log10(abs(value)))
    if not -5 < exponent < 15:
        mantissa, power = f"{value:{sign}.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{power}"
    text = f"{value:{sign},.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and unit not in _TIMES else text


def exact(value: float) -> str:
    """The shortest text that reads back as the same number; `3604480`, `0.515625`, `NaN`."""
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite(value)
    return repr(value)


def counted_of(n: int, what: str) -> str:
    """`pair of requests` of one, `pairs of requests` of more."""
    first, *rest = what.split(" ")
    return " ".join((first.removesuffix("s"), *rest)) if n == 1 else what


def non_finite(value: float) -> str:
    """`NaN`, `Infinity` or `-Infinity`: the words of JSON's Python dialect, which the records use."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _two_digits(value: float, decimals: int | None) -> int | None:
    """As many decimals as the interval asks for, or, up to six, as show two digits of a value that it would round away."""
    if decimals is None or not value or not math.isfinite(value):
        return decimals
    return max(decimals, min(1 - math.floor(math.log10(abs(value))), 6))


def _interval_decimals(low: float | None, high: float | None) -> int | None:
    """Decimals that leave the interval's width three significant digits; None without a usable interval."""
    if low is None or high is None or not math.isfinite(high - low) or high <= low:
        return None
    return min(12, max(0, 2 - math.floor(math.log10(high - low))))


def in_megabytes(n: float) -> str:
    """`3604480` -> `3.4375 MiB, 3.60 MB`: MiB = 2^20 B, MB = 10^6 B, never one under the other's label."""
    mib = f"{n / 2**20:,.4f}".rstrip("0")
    return f"{mib}{'0' if mib.endswith('.') else ''} MiB, {n / 1e6:,.2f} MB"


def bytes_text(n: int | None) -> str:
    """`3,604,480 B (3.4375 MiB, 3.60 MB)`: bytes first, then both units."""
    return shown(n, "B").brief


def one_line(text: str, limit: int | None = None) -> str:
    """Text from outside on one line: whatever is not printable (newlines, escapes, direction overrides) is shown
    as its escape, and more than `limit` characters lose their middle.
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if limit is None or len(line) <= limit:
        return line
    head = (limit - 1) * 2 // 3
    return f"{line[:head]}…{line[len(line) - (limit - 1 - head) :]}"


def plain(value: Any, limit: int | None = None) -> str:
    """Any JSON value as one line of text: numbers exact, None as "not measured", containers as JSON."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, str):
        return one_line(value, limit)
    if isinstance(value, Mapping | Sequence):
        return one_line(json.dumps(value, ensure_ascii=False, default=str), limit)
    return one_line(str(value), limit)


def fact(key: str, value: Any) -> tuple[str, str]:
    """One recorded fact as (name, text): counts of bytes with both units, long lists as their length."""
    if key.endswith("bytes") and isinstance(value, int):
        return one_line(key, 60), bytes_text(value)
    long_list = isinstance(value, list | tuple) and len(value) > 8
    return one_line(key, 60), f"{len(value)} values" if long_list else plain(value, 200)


def flatten(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """`{"gpu": {"name": "x"}}` -> `[("gpu.name", "x")]`, in the mapping's order; lists stay whole."""
    pairs: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
